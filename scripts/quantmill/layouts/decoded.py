"""A weight that a checkpoint holds in low bits, as a tensor whose elements are decoded while they are read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from quantmill.checkpoint.finite import first_not_finite
from quantmill.checkpoint.tensor import CHUNK, Tensor, rechunk, row_major
from quantmill.common.program import UserError
from quantmill.layouts import FLOATS, NUMPY, array

PIECE = 2**20  # elements that are decoded at a time, or one row
LARGEST_ROW = 2**17  # elements; no model has a wider layer, and a row is decoded whole
SCALES = FLOATS | {"F8_E8M0"}
AGAIN = "download the model again"


@dataclass(frozen=True)
class Decoded(Tensor):
    """A weight in low bits, by the name, shape and dtype that it is decoded to.

    Attributes:
        parts: names of the stored tensors that hold it; scales: that of its scales.
        pieces: return an iterator over its float32 values, in row-major order.
    """

    parts: frozenset[str]
    scales: Tensor
    pieces: Callable[[], Iterator[np.ndarray]]

    def chunks(self, size: int = CHUNK) -> Iterator[memoryview]:
        """See `Tensor.chunks`. Raises `UserError` for a weight that is NaN or beyond the dtype's range."""
        return rechunk(self._read_pieces(), size)

    def _read_pieces(self) -> Iterator[memoryview]:
        place, pieces = 0, self.pieces()
        while True:
            with np.errstate(over="ignore"):  # the result is looked at
                values = next(pieces, None)
            if values is None:
                return
            data = rounded(values, self.dtype).reshape(-1).view(np.uint8).data
            if (found := first_not_finite(data, self.dtype)) is not None:
                where = [int(index) for index in np.unravel_index(place + found, self.shape)]
                wrong = np.isnan(values.reshape(-1)[found])
                what = "NaN" if wrong else f"beyond what {self.dtype} holds"
                do = AGAIN if wrong else f"let config.json say a dtype of more range, or {AGAIN}"
                raise UserError(f"{self.path}: {self.name} is {what} at {where}; {do}")
            yield data
            place += values.size


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values in a dtype of safetensors, rounded to the nearest, of two to the even one; bfloat16, which
    numpy does not have, as uint16."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, NUMPY[dtype])


def make(
    name: str,
    shape: tuple[int, ...],
    parts: Iterable[Tensor],
    scales: Tensor,
    pieces: Callable[[], Iterator[np.ndarray]],
) -> Decoded:
    """Return a weight of float32 that some stored tensors hold; the first of `parts` has its numbers. Raises
    `UserError` for scales that are not floats, and for rows that are too long to decode."""
    numbers, *_ = parts = [*parts]
    if scales.dtype not in SCALES:
        raise UserError(f"{scales.path}: {scales.name} is {scales.dtype}, and scales are floats; {AGAIN}")
    if max(shape[1:], default=0) > LARGEST_ROW:
        raise UserError(f"{numbers.path}: {numbers.name} is {list(numbers.shape)}, wider than any model's; refused")
    names = frozenset(each.name for each in parts)
    return Decoded(name, "F32", shape, row_major(shape), numbers.path, numbers.start, names, scales, pieces)


def matrix_pieces(
    shape: tuple[int, ...], decode: Callable[[int, int], np.ndarray], multiple: int = 1
) -> Iterator[np.ndarray]:
    """Yield the rows of a matrix [outputs, inputs], as `decode(first, last)` returns them, about `PIECE` elements at a
    time. `first` is a multiple of `multiple`."""
    outputs, inputs = shape
    step = max(1, PIECE // max(1, inputs * multiple)) * multiple
    for first in range(0, outputs, step):
        yield decode(first, min(first + step, outputs))


def part(stored: Mapping[str, Tensor], name: str, of: str) -> Tensor:
    """Return a stored tensor. Raises `UserError` if it is missing. of: name of the tensor that cannot be read then."""
    if name not in stored:
        raise UserError(f"{stored[of].path}: {of} is quantized, and {name} is missing; {AGAIN}")
    return stored[name]


def check_shape(tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    """Raise `UserError` if a stored tensor does not have the shape that follows from other parts, as `why` says."""
    if tensor.shape != shape:
        raise UserError(
            f"{tensor.path}: {tensor.name} is {list(tensor.shape)}, and {why} it {list(shape)}; correct "
            f"config.json, or {AGAIN}"
        )


def blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the numbers of blocks [rows, columns] of a matrix; the last of a row or column may be cut."""
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def is_power_of_two(size: object) -> bool:
    """Return whether a value from a config is a power of two. Of such sizes of blocks a count of scales fits one alone,
    so that a wrong size cannot go unnoticed."""
    return type(size) is int and 0 < size < 2**31 and size & (size - 1) == 0


def check_scales(tensor: Tensor) -> None:
    """Raise `UserError` for a scale that is not a positive number in float32, in which weights are multiplied."""
    flat = replace(tensor, shape=(tensor.numel,), stride=(1,))
    for first in range(0, tensor.numel, PIECE):
        with np.errstate(over="ignore"):
            found = array(flat.rows(first, min(first + PIECE, tensor.numel))).astype(np.float32)
        wrong = ~((found > 0) & (found < np.inf))
        if wrong.any():
            place = int(np.argmax(wrong))
            where = [int(index) for index in np.unravel_index(first + place, tensor.shape)]
            what = f"{tensor.name} is {found[place]:g} at {where}"
            raise UserError(f"{tensor.path}: {what}, and a scale is a positive number; {AGAIN}")
