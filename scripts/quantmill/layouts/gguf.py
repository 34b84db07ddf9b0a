"""GGUF: llama.cpp's tensors, dequantized by the numpy code of its Python package.

That package is not the library that quantizes and runs: it is in another language, by the same authors. It is the one
exception to reading formats alone, because the types are many and some have tables of hundreds of numbers. It also maps
the names. The converter reorders rows of some models' queries and keys and adds one to some norms, by rules for each
architecture. So of all such variants of a tensor the one nearest to the source's is taken, and a tensor without a near
variant is refused.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quantmill import llamacpp
from quantmill.checkpoint import gguf_file
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError
from quantmill.layouts import Reading, Unread, array, stacked, step_round
from quantmill.llamacpp import files

NEAR = 0.8  # of the source's norm: the largest distance, which two bits a weight may have
BLOCK, SMALL_BLOCK = 256, 32  # inputs that share a scale where the library rounds activations
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def rounding(artifact: Path) -> Callable[[str, Any], Any]:
    """See `layouts`. Rows are rounded in blocks of 256, or of 32 if a row is not a multiple of that."""

    def round_input(layer: str, x: Any) -> Any:
        size = BLOCK if x.shape[-1] % BLOCK == 0 else SMALL_BLOCK
        if x.shape[-1] % size:
            return x
        return step_round(x.reshape(*x.shape[:-1], -1, size), 127).reshape(x.shape)

    return round_input


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `UserError` for a tensor that is not the source's, and `Unread` for an architecture or a
    tensor that llama.cpp's package has no name for."""
    gguf = llamacpp.gguf()
    content = gguf_file.read_all(files.first(artifact))
    metadata = content.metadata
    architecture = metadata["general.architecture"]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        raise Unread(f"llama.cpp's package knows no architecture {architecture}")
    names = gguf.get_tensor_name_map(kinds[architecture], metadata[f"{architecture}.block_count"])
    heads = metadata.get(f"{architecture}.attention.head_count", 1)
    kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)

    def stored(tensor: Tensor) -> np.ndarray:
        expert = EXPERT.search(tensor.name)
        name = names.get_name(EXPERT.sub(".experts.", tensor.name), try_suffixes=(".weight", ".bias"))
        if name not in content.tensors:  # gpt-oss's sinks have no `.weight`
            name = f"{name}.weight"
        if name not in content.tensors:
            raise Unread(f"it holds no {tensor.name}")
        record = content.tensors[name]
        raw = np.memmap(record.path, np.uint8, "r", record.offset, (record.nbytes,))
        kind = gguf.GGMLQuantizationType[record.type]
        shape = record.shape
        if expert:
            shape = shape[1:]
            raw = raw.reshape(record.shape[0], -1)[int(expert[1])]
        rows = raw.reshape(*shape[:-1], -1)
        return gguf.quants.dequantize(rows.view(FLOATS.get(record.type, np.uint8)), kind).astype(np.float32)

    read_stack = stacked.reader(source, stored, array)

    def weights(tensor: Tensor) -> np.ndarray:
        read = read_stack if stacked.STACKED.fullmatch(tensor.name) else stored
        values, theirs = read(tensor), array(tensor).astype(np.float32)
        found = min(
            (each for each in ways(values, heads, kv_heads) if each.shape == theirs.shape),
            key=lambda each: float(np.linalg.norm(each - theirs)),
            default=None,
        )
        if found is None:
            raise Unread(f"{tensor.name} is {list(theirs.shape)} and stored as {list(values.shape)}")
        if np.linalg.norm(found - theirs) > NEAR * np.linalg.norm(theirs):
            raise UserError(f"{artifact}: {tensor.name} is another tensor than the source's")
        return found

    return weights


FLOATS = {"F32": np.float32, "F16": np.float16}


def ways(values: np.ndarray, heads: int, kv_heads: int) -> Iterator[np.ndarray]:
    """Yield what the converter can have made a tensor from: itself, less one, and with rows in the order of rotary
    halves."""
    yield values
    if values.ndim == 1:
        yield values - 1
    for count in {each for each in (heads, kv_heads) if type(each) is int and each}:  # a list has one for each layer
        if len(values) % (2 * count) == 0:
            yield values.reshape(count, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
