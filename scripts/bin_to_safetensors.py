#!/usr/bin/env python3
"""Convert a checkpoint's pytorch_model*.bin files to safetensors, without running what their pickles say.

    python scripts/bin_to_safetensors.py SRC DST

SRC is a model's folder, DST the new one. Every shard becomes one .safetensors shard with the same tensors, the index is
rewritten, and config, tokenizer and generation files are carried along. Weights that already are safetensors are
linked. Memory stays constant, whatever the size of the model.
"""

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from checkpoint import safetensors_file, shards
from checkpoint.shards import Checkpoint
from checkpoint.tensor import Tensor
from common import manifest
from common.program import UserError, parser, run
from common.publish import place, publish


def drop_tied(config: dict, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave lm_head out where the config ties it to the embeddings, and check that the checkpoint agrees.

    transformers 5 initialises a head at random where it is missing and not tied, and silently unties heads that differ.
    """
    head, embeddings = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    tied = config.get("tie_word_embeddings")  # where it is absent, the model's class decides, and only it knows
    if tied is False and head is None and embeddings is not None and "ForCausalLM" in str(config.get("architectures")):
        raise UserError(
            f"{embeddings.path.parent}: no lm_head.weight, and config.json does not tie it to the embeddings; "
            "set tie_word_embeddings to true if the model's author meant that, or download it again"
        )
    if not tied or head is None or embeddings is None:
        return tensors
    same = (head.path, head.start, head.shape) == (embeddings.path, embeddings.start, embeddings.shape)
    if not same and not equal_bytes(head, embeddings):
        raise UserError(
            f"{head.path}: lm_head.weight differs from the embeddings that config.json ties it to; "
            "set tie_word_embeddings to false, or download it again"
        )
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def equal_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, however either lies in its file."""

    def digest(tensor: Tensor) -> bytes:
        hashed = hashlib.sha256()
        for chunk in tensor.chunks():
            hashed.update(chunk)
        return hashed.digest()

    return (first.dtype, first.shape) == (second.dtype, second.shape) and digest(first) == digest(second)


def convert(source: Checkpoint, folder: Path, progress: Callable[[int], None]) -> list[str]:
    """Write the shards and the index to `folder`; return the names of the shards."""
    tensors = drop_tied(source.config(), source.tensors())
    by_file = [[tensor for tensor in tensors.values() if tensor.path == file] for file in source.files]
    by_file = [group for group in by_file if group]
    names = shards.safetensors_names(len(by_file))
    for name, group in zip(names, by_file, strict=True):
        safetensors_file.write(folder / name, group, progress=progress)
    if len(names) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = shards.index_json(dict(zip(names, by_file, strict=True)), total)
        (folder / shards.INDEXES["safetensors"]).write_text(index, encoding="utf-8")
    return names


def link(source: Checkpoint, folder: Path) -> list[str]:
    """Give safetensors files, and their index, a name in `folder`."""
    source.tensors()  # refuses what is cut off or contradicts itself
    index = source.folder / shards.INDEXES["safetensors"]
    for file in [*source.files, *([index] if index.exists() else [])]:
        place(file, folder / file.name)
    return [file.name for file in source.files]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("src", type=Path, help="folder of the model as published")
    arguments.add_argument("dst", type=Path, help="folder to write")
    options = arguments.parse_args()

    source = shards.find(options.src)
    with publish(options.dst) as folder:
        folder.mkdir()
        if source.form == "bin":
            size = sum(file.stat().st_size for file in source.files)
            with tqdm(total=size, unit="B", unit_scale=True, desc="to safetensors", disable=None) as bar:
                names = convert(source, folder, bar.update)
        else:
            names = link(source, folder)
        for path in source.others():
            place(path, folder / path.name)
        tensors = shards.find(folder).tensors()
        origin = manifest.read(options.src)["source"] if (options.src / manifest.NAME).exists() else {}
        manifest.write(
            folder,
            format="safetensors",
            tool="bin_to_safetensors" if source.form == "bin" else "link",
            tool_version=f"python {platform.python_version()}",
            source=origin,
            parameter_count=sum(tensor.numel for tensor in tensors.values()),
            weight_files=names,
        )


if __name__ == "__main__":
    run(main)
