#!/usr/bin/env python3
"""Convert a checkpoint's pytorch_model*.bin files to safetensors, without running what their pickles say.

    python scripts/bin_to_safetensors.py SRC DST [--verify] [--finite] [--max-shard-size 5GB] [--tensors tensors.json]

SRC is a model's folder, DST the new one. Every shard becomes one .safetensors shard with the same tensors, the index is
rewritten, and config, tokenizer and generation files are carried along. Weights that already are safetensors are
copied. Memory stays constant, whatever the size of the model. With --tensors, what name_tensors.py wrote, DST holds
what the model uses and no more; its manifest names the rest.
"""

from pathlib import Path

from checkpoint import shards, used
from checkpoint.conversion import drop_tied, parser, publish_converted
from common.program import run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--finite", action="store_true", help="refuse weights that are NaN or infinite")
    arguments.add_argument("--tensors", type=Path, help="which of them the model uses; default: all")
    options = arguments.parse_args()
    source = shards.find(options.src)
    tensors = source.tensors()
    listed = used.read(options.tensors, tensors) if options.tensors else None
    kept = drop_tied(source.config(), listed.kept(tensors) if listed else tensors)
    linked = source.form == "safetensors" and not options.max_shard_size and len(kept) == len(tensors)
    publish_converted(
        source,
        kept,
        "safetensors",
        options,
        tool="bin_to_safetensors",
        linked=linked,
        only_finite=options.finite,
        left_out=listed.as_source() if listed else {},
    )


if __name__ == "__main__":
    run(main)
