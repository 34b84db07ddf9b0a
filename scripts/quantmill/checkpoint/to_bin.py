"""Convert a checkpoint's safetensors to pytorch_model*.bin files, for tools that still need them.

    python scripts/quantmill checkpoint.to_bin SRC DST [--verify] [--max-shard-size 5GB]

SRC is a model's folder, DST the new one. Every shard becomes one .bin shard with the same tensors, which torch.load
reads with weights_only=True and mmap=True. The index is rewritten; config, tokenizer and generation files are copied.
Memory stays constant, whatever the size of the model.
"""

from quantmill.checkpoint import shards
from quantmill.checkpoint.conversion import parser, write_converted
from quantmill.common.program import UserError


def main() -> None:
    options = parser(__doc__).parse_args()
    source = shards.find(options.src)
    if source.form == "bin" and not options.max_shard_size:
        raise UserError(f"{options.src}: holds .bin files already; nothing to convert")
    write_converted(source, source.tensors(), "bin", options, tool="safetensors_to_bin")
