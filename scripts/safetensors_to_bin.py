#!/usr/bin/env python3
"""Convert a checkpoint's safetensors to pytorch_model*.bin files, for tools that still want them.

    python scripts/safetensors_to_bin.py SRC DST

SRC is a model's folder, DST the new one. Every shard becomes one .bin shard with the same tensors, which torch.load
reads with weights_only=True and mmap=True; the index is rewritten; config, tokenizer and generation files are carried
along. Memory stays constant, whatever the size of the model.
"""

import platform
from pathlib import Path

from tqdm import tqdm

from checkpoint import shards, torch_zip
from common import manifest
from common.program import UserError, parser, run
from common.publish import place, publish


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("src", type=Path, help="folder of safetensors")
    arguments.add_argument("dst", type=Path, help="folder to write")
    options = arguments.parse_args()

    source = shards.find(options.src)
    if source.form != "safetensors":
        raise UserError(f"{options.src}: holds .bin files already; nothing to convert")
    tensors = source.tensors()
    groups = [[tensor for tensor in tensors.values() if tensor.path == file] for file in source.files]
    names = shards.bin_names(len(groups))
    total = sum(tensor.nbytes for tensor in tensors.values())
    with publish(options.dst) as folder:
        folder.mkdir()
        with tqdm(total=total, unit="B", unit_scale=True, desc="to .bin", disable=None) as bar:
            for name, group in zip(names, groups, strict=True):
                torch_zip.write(folder / name, group, bar.update)
        if len(names) > 1:
            index = shards.index_json(dict(zip(names, groups, strict=True)), total)
            (folder / shards.INDEXES["bin"]).write_text(index, encoding="utf-8")
        for path in source.others():
            place(path, folder / path.name)
        origin = manifest.read(options.src) if (options.src / manifest.NAME).exists() else {"source": {}}
        manifest.write(
            folder,
            format="bin",
            tool="safetensors_to_bin",
            tool_version=f"python {platform.python_version()}",
            source=origin["source"],
            parameter_count=sum(tensor.numel for tensor in tensors.values()),
            weight_files=names,
        )


if __name__ == "__main__":
    run(main)
