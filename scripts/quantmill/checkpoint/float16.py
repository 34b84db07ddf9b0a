"""Store floating-point weights as float16."""

import io
from collections.abc import Iterator

import numpy as np

from quantmill.checkpoint.copying import copy, write_all
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError

CAST = {"F32", "BF16", "F64"}  # what becomes F16; integers and booleans stay


class BeyondFloat16(UserError):
    """A tensor holds a weight beyond the range of float16."""


def stored_dtype(tensor: Tensor) -> str:
    """Return the dtype that a tensor has in the artifact. Raises `UserError` for float8: its scales are stored
    elsewhere, and the values alone would make another model."""
    if tensor.dtype.startswith("F8_"):
        raise UserError(
            f"{tensor.path}: {tensor.name} is float8, quantized already; name a model with the original weights"
        )
    return "F16" if tensor.dtype in CAST else tensor.dtype


def write_float16(tensor: Tensor, target: io.FileIO) -> None:
    """Append a tensor's elements as float16. Raises `BeyondFloat16` if a finite weight would become infinite."""
    if tensor.dtype not in CAST:
        copy(tensor, target)
        return
    for rounded, overflows in _as_float16(tensor):
        if overflows:
            raise BeyondFloat16(
                f"{tensor.path}: {tensor.name} holds weights beyond 65,504, which float16 cannot hold; "
                "leave the formats that store it in float16 out of this model's formats"
            )
        write_all(target, rounded.view(np.uint8).data)


def fits(tensor: Tensor) -> bool:
    """Return whether all finite elements of a tensor are within the range of float16."""
    return tensor.dtype not in CAST or not any(overflows for _, overflows in _as_float16(tensor))


def _as_float16(tensor: Tensor) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield a tensor's elements in pieces as float16, and whether a finite element of the piece became infinite."""
    for chunk in tensor.chunks():  # pieces end between elements: `CHUNK` is a multiple of every width
        values = as_float(chunk, tensor.dtype)
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16)
        yield rounded, bool(np.any(np.isinf(rounded) & np.isfinite(values)))


def as_float(data: memoryview, dtype: str) -> np.ndarray:
    """Return little-endian F64, F32 or BF16 bytes as a float array. bfloat16 is the upper half of a float32."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f8")
