#!/usr/bin/env python3
"""Convert a checkpoint's pytorch_model*.bin files to safetensors, without running what their pickles say.

    python scripts/bin_to_safetensors.py SRC DST [--verify] [--finite] [--max-shard-size 5GB]

SRC is a model's folder, DST the new one. Every shard becomes one .safetensors shard with the same tensors, the index is
rewritten, and config, tokenizer and generation files are carried along. Weights that already are safetensors are
linked. What torch.compile, DDP and the like put before all names (`_orig_mod.`, `module.`) is taken off, and the
manifest says so. Memory stays constant, whatever the size of the model.
"""

import sys

from checkpoint import headers
from checkpoint.conversion import drop_tied, parser, publish_converted
from common.program import run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--finite", action="store_true", help="refuse weights that are NaN or infinite")
    options = arguments.parse_args()
    model = headers.read(options.src)
    source, kept = model.checkpoint, drop_tied(model.config, model.tensors)
    as_it_is = not (options.max_shard_size or model.dropped) and len(kept) == len(model.tensors)
    if model.dropped:
        print(f"note: {options.src}: {model.dropped} is taken off the tensors' names", file=sys.stderr)
    publish_converted(
        source,
        kept,
        "safetensors",
        options,
        tool="bin_to_safetensors",
        linked=as_it_is and source.form == "safetensors",
        only_finite=options.finite,
        dropped=model.dropped,
    )


if __name__ == "__main__":
    run(main)
