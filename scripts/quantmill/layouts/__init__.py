"""The weights of an artifact, read by its format's description alone. Each layout has a module of its common name.

No module uses the library that made or runs the format: reading is numpy. The shortest are hf.py and torchao.py. Every
module has

- `read(artifact, source)`: return a function that maps a tensor of the source to the float32 array that the artifact
  holds in its place, in the same shape. `read_layers` makes it for safetensors whose matrices alone are packed. Raise
  `Unread` for a packing that the module does not know; the artifact is then not compared.

A layout of safetensors that others may have built also has

- `packed_shapes(words, shape)`: return the tensors that hold a matrix of this shape, part -> shape; `words` are the
  artifact's quantization_config. A layer without any of them is stored as in the source.
- `PARTS`: a pattern of all parts that a layer may have.
- `check(layer)`, optional: raise `Unread` or `UserError` for what the format's library would read beyond its bounds.

Optional for every layout:

- `rounding(artifact)`: return a function of a layer's name and its input, a tensor of torch, that rounds the input as
  the engine does; None if the engine of this artifact rounds nothing.
- `own_head(artifact)`: return whether the artifact has a head although its model ties it to the embeddings.

A layout in which authors publish models, so that a source can have it, stands in `published.LAYOUTS` and has

- `describe(words)`: return its numbers and scales in words. Raise `Unread` for a scheme that is not decoded.
- `decoded(words, stored)`: return the weights that a checkpoint's tensors hold, as `decoded.Decoded` of F32. Raise
  `UserError` for tensors that do not fit each other or the scheme. fp8.py and mxfp4.py have these two alone.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.checkpoint.float16 import CAST, as_float
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.layouts import stacked

FLOATS = CAST | {"F16"}
Reading = Callable[[Tensor], np.ndarray]
NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "U32": "<u4", "I64": "<i8", "I16": "<i2"}
NUMPY |= {"U8": "u1", "I8": "i1"}
FOUR_BITS = np.arange(0, 32, 4, dtype=np.uint32)


def _e4m3() -> np.ndarray:
    """Return the values of float8 e4m3 by their bytes (arXiv:2209.05433): no infinities, and NaN if all bits but the
    sign are set."""
    exponent, mantissa = np.divmod(np.arange(128, dtype=np.float32), 8)
    values = np.where(exponent > 0, (1 + mantissa / 8) * np.exp2(exponent - 7), mantissa / 8 * np.exp2(np.float32(-6)))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3()
E8M0 = np.append(np.exp2(np.arange(-127, 128, dtype=np.float32)), np.float32(np.nan))  # a power of two by its byte
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])  # the values of four-bit floats
BYTES = {"F8_E4M3": E4M3, "F8_E8M0": E8M0}


class Unread(Exception):
    """The artifact's weights are stored in a way that no module reads. This is not held against the artifact."""


def array(tensor: Tensor) -> np.ndarray:
    """Return a stored tensor, bfloat16 and float8 (e4m3, e8m0) as float32. Raises `Unread` for a dtype that numpy does
    not have."""
    data = b"".join(map(bytes, tensor.chunks()))
    if tensor.dtype in BYTES:
        return BYTES[tensor.dtype][np.frombuffer(data, "u1")].reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return as_float(memoryview(data), "BF16").reshape(tensor.shape)
    if tensor.dtype not in NUMPY:
        raise Unread(f"{tensor.name} is {tensor.dtype}")
    return np.frombuffer(data, NUMPY[tensor.dtype]).reshape(tensor.shape)


# Mixtral's names as in tools based on transformers 5 -> as it was published
OLDER = ((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."))


def stored_tensors(artifact: Path, source: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of an artifact's folder, by the names that its source has for them."""
    found = shards.find(artifact).tensors()
    if not any(OLDER[0][1] in name for name in source.tensors()):
        return found
    older = {}
    for name, tensor in found.items():
        for new, old in OLDER if ".mlp." in name else ():
            name = name.replace(new, old)
        older[name] = tensor
    return older


def find(stored: Mapping[str, Tensor], name: str) -> np.ndarray:
    """Return a stored tensor by its name. Raises `Unread` if it is missing."""
    if name not in stored:
        raise Unread(f"it holds no {name}")
    return array(stored[name])


@dataclass(frozen=True)
class Layer:
    """A linear layer: its matrix in the source, and all tensors of the artifact."""

    matrix: Tensor
    stored: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        """The layer's name, without `.weight`."""
        return self.matrix.name.removesuffix(".weight")

    def tensor(self, part: str) -> Tensor | None:
        """Return the stored tensor of a part, such as `scales`; None if there is none."""
        return self.stored.get(f"{self.name}.{part}")

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.stored

    def __getitem__(self, part: str) -> np.ndarray:
        """Return a part as it is stored. Raises `Unread` if it is missing."""
        return find(self.stored, f"{self.name}.{part}")

    def rows(self, part: str, first: int, last: int, each: int = 1) -> np.ndarray:
        """Return the part of a layer's rows `first` to `last`, as a matrix of which a row stands for `each` rows of the
        layer. Raises `Unread` if it is missing."""
        found = self.tensor(part)
        if found is None or found.numel == 1:
            return self[part].reshape(1, 1)
        found = found.rows(first // each, -(-last // each))
        return array(found).reshape(found.shape[0], -1)

    def floats(self, part: str) -> np.ndarray:
        """Return a part as float32."""
        return self[part].astype(np.float32)


def read_layers(
    artifact: Path, source: Checkpoint, markers: Iterable[str], weights: Callable[[Layer], np.ndarray]
) -> Reading:
    """Return the `Reading` of safetensors: layers with a part of `markers` by `weights`, other tensors as stored.

    Experts that the source stacks may be stored one by one.
    """
    stored = stored_tensors(artifact, source)

    def read_one(tensor: Tensor) -> np.ndarray:
        layer = Layer(tensor, stored)
        return weights(layer) if any(part in layer for part in markers) else find(stored, tensor.name)

    read_stack = stacked.reader(source, read_one, array)

    def reading(tensor: Tensor) -> np.ndarray:
        one_by_one = tensor.name not in stored and stacked.STACKED.fullmatch(tensor.name)
        return (read_stack if one_by_one else read_one)(tensor)

    return reading


def quantization(artifact: Path) -> dict[str, Any]:
    """Return the quantization_config of an artifact's config.json, empty if there is none."""
    return shards.read_json(artifact / "config.json").get("quantization_config") or {}


def nibbles(words: np.ndarray) -> np.ndarray:
    """Unpack int32 [..., n] to float32 [..., n, 8]: the eight numbers of each word, the lowest bits first."""
    return ((words.view(np.uint32)[..., None] >> FOUR_BITS) & 15).astype(np.float32)


def four_bit_floats(halves: np.ndarray) -> np.ndarray:
    """Unpack uint8 [..., n] to float32 [..., 2 n]: two four-bit floats (e2m1) a byte, that of the lower half first."""
    return E2M1[np.stack([halves & 15, halves >> 4], axis=-1)].reshape(*halves.shape[:-1], -1)


def spread(
    values: np.ndarray,
    block: tuple[int, int],
    shape: tuple[int, int],
    first: int = 0,
    of_input: np.ndarray | None = None,
) -> np.ndarray:
    """Return the value of each element, float32 of `shape`, from those of the blocks [rows, columns] that share one.

    Args:
        values: [rows of blocks, columns of blocks], from the block of the matrix's row `first` on.
        shape: of the rows of the matrix from `first` on.
        of_input: the column of `values` of each of a row's elements, if they are not in order.
    """
    of_row = np.arange(first, first + shape[0]) // block[0] - first // block[0]
    columns = np.arange(shape[1]) // block[1] if of_input is None else of_input
    return values.astype(np.float32)[of_row][:, columns]


def step_round(x: Any, steps: int) -> Any:
    """Round each row of a tensor of torch [..., inputs] to `steps` steps to either side; its largest value is the last
    step."""
    step = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / steps
    return (x / step).round() * step


def module(layout: str) -> ModuleType:
    """Import the module of a layout, `-` as `_`."""
    return importlib.import_module(f"quantmill.layouts.{layout.replace('-', '_')}")


def rounding(layout: str, artifact: Path) -> Callable[[str, Any], Any] | None:
    """Return what `rounding` of a layout's module returns; None if it has no such function."""
    says = getattr(module(layout), "rounding", None)
    return says(artifact) if says else None


def own_head(layout: str, artifact: Path) -> bool:
    """Return what `own_head` of a layout's module returns; False if it has no such function."""
    says = getattr(module(layout), "own_head", None)
    return bool(says and says(artifact))
