"""Convert a checkpoint's pytorch_model*.bin files to safetensors, without running their pickles.

    python scripts/quantmill checkpoint.to_safetensors SRC DST [--verify] [--finite] [--max-shard-size 5GB]
        [--tensors tensors.json]

SRC is a model's folder, DST the new one. Every shard becomes one .safetensors shard with the same tensors. The index is
rewritten; config, tokenizer and generation files are copied. Weights that already are safetensors are copied. A prefix
of all names, as of torch.compile or DDP (`_orig_mod.`, `module.`), is removed and recorded in the manifest. With
--tensors, the output of fetch.name_tensors, DST holds only what the model uses; its manifest names the rest. Memory
stays constant, whatever the size of the model.
"""

import sys
from pathlib import Path

from quantmill.checkpoint import headers, used
from quantmill.checkpoint.conversion import drop_tied, parser, write_converted


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--finite", action="store_true", help="refuse weights that are NaN or infinite")
    arguments.add_argument("--tensors", type=Path, help="which of them the model uses; default: all")
    options = arguments.parse_args()
    model = headers.read(options.src)
    source = model.checkpoint
    listed = used.read(options.tensors, model.tensors) if options.tensors else None
    kept = drop_tied(model.config, listed.kept(model.tensors) if listed else model.tensors)
    as_it_is = not (options.max_shard_size or model.dropped) and len(kept) == len(model.tensors)
    if model.dropped:
        print(f"note: {options.src}: {model.dropped} is taken off the tensors' names", file=sys.stderr)
    write_converted(
        source,
        kept,
        "safetensors",
        options,
        tool="bin_to_safetensors",
        linked=as_it_is and source.form == "safetensors",
        only_finite=options.finite,
        wrapper=model.dropped,
        left_out=listed.as_source() if listed else {},
    )
