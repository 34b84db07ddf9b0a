"""The place of a tensor on disk: the common ground of the readers and the writers."""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quantmill.common.plain_file import open_plain
from quantmill.common.program import UserError

CHUNK = 256 * 1024  # bytes; larger buffers exceed the L2 cache, smaller ones cost calls
GATHERED = 8 * 2**20  # bytes of a non-contiguous tensor that are reordered at a time
MAX_DIMENSIONS = 16
MAX_NAME = 1000  # characters of a tensor's name
POINTER = b"version https://git-lfs"

# Bytes of one element of each of safetensors' dtypes, in the order of its own enumeration (safetensors/src/tensor.rs),
# by which its writer sorts tensors
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        dtype: safetensors' name, e.g. `BF16`.
        shape, stride: in elements; strides as torch has them.
        path: the file; start: the byte in it at which element 0 lies.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    path: Path
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_weight(self) -> bool:
        """True for what may be a weight. Older checkpoints also hold causal masks [1, 1, n, n] and scalars, which no
        library loads (GPT-2, GPT-NeoX)."""
        mask = len(self.shape) == 4 and self.shape[:2] == (1, 1) and self.shape[2] == self.shape[3]
        return bool(self.shape) and not mask and "F" in self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, laid out without gaps."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def contiguous(self) -> bool:
        """True if the elements lie in the file in row-major order without gaps."""
        return self.numel == 0 or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.stride, row_major(self.shape), strict=True)
        )

    def chunks(self, size: int = CHUNK) -> Iterator[memoryview]:
        """Yield the elements in row-major order, little-endian, `size` bytes at a time (the last piece may be shorter).
        A piece is valid until the next one. Raises EOFError if the file has become shorter."""
        size = min(size, self.nbytes)
        if self.contiguous:
            buffer = memoryview(bytearray(size))
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start)
                for begin in range(0, self.nbytes, size or 1):
                    piece = buffer[: self.nbytes - begin]
                    read_into(file, piece)
                    yield piece
        else:
            yield from rechunk(self._strided_chunks(), size)

    def rows(self, first: int, last: int) -> "Tensor":
        """Return the elements `first` to `last` of the first dimension, as a tensor of this name."""
        start = self.start + first * self.stride[0] * DTYPE_BYTES[self.dtype]
        return replace(self, start=start, shape=(last - first, *self.shape[1:]))

    def plane(self, index: int) -> "Tensor":
        """Return one element of the first dimension, as a tensor of this name."""
        found = self.rows(index, index + 1)
        return replace(found, shape=self.shape[1:], stride=self.stride[1:])

    def _strided_chunks(self) -> Iterator[memoryview]:
        """Yield the elements in row-major order, in blocks of at most `GATHERED` bytes."""
        with self.path.open("rb", buffering=0) as file:
            for start, shape, stride in _blocks(self.start, self.shape, self.stride, DTYPE_BYTES[self.dtype]):
                block = np.empty(shape, f"V{DTYPE_BYTES[self.dtype]}")
                _gather(file, start, stride, block)
                yield block.reshape(-1).view(np.uint8).data


def _blocks(
    start: int, shape: tuple[int, ...], stride: tuple[int, ...], width: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut a view, in row-major order, into (first byte, shape, stride) of at most `GATHERED` bytes each."""
    if math.prod(shape) * width <= GATHERED:
        yield start, shape, stride
        return
    rows = max(1, GATHERED // (math.prod(shape[1:]) * width))
    for low in range(0, shape[0], rows):
        first = start + low * stride[0] * width
        count = min(rows, shape[0] - low)
        if count == 1:
            yield from _blocks(first, shape[1:], stride[1:], width)
        else:
            yield first, (count, *shape[1:]), stride


def _gather(file: io.FileIO, start: int, stride: tuple[int, ...], block: np.ndarray) -> None:
    """Fill `block` from a strided view: halve it until its span in the file is small, read that, and pick the elements.
    Reading is better than mapping: pages that are touched count as memory, and a transposed tensor touches them all."""
    span = 1 + sum((size - 1) * step for size, step in zip(block.shape, stride, strict=True))
    if span * block.itemsize <= CHUNK or block.size == 1:
        raw = bytearray(span * block.itemsize)
        file.seek(start)
        read_into(file, memoryview(raw))
        steps = tuple(step * block.itemsize for step in stride)
        elements = np.frombuffer(raw, block.dtype)
        block[...] = np.lib.stride_tricks.as_strided(elements, block.shape, steps, writeable=False)
        return
    axis = max(range(block.ndim), key=lambda axis: (block.shape[axis] - 1) * stride[axis])
    middle = block.shape[axis] // 2
    low, high = np.split(block, [middle], axis)
    _gather(file, start, stride, low)
    _gather(file, start + middle * stride[axis] * block.itemsize, stride, high)


def rechunk(pieces: Iterator[memoryview], size: int) -> Iterator[memoryview]:
    """Yield the same bytes, `size` at a time."""
    buffer, filled = memoryview(bytearray(size)), 0
    for piece in pieces:
        while piece:
            count = min(size - filled, len(piece))
            buffer[filled : filled + count] = piece[:count]
            piece, filled = piece[count:], filled + count
            if filled == size:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def read_into(file: io.FileIO, buffer: memoryview) -> None:
    """Fill the whole buffer. Raises EOFError if the file ends first."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise EOFError(f"{file.name} has become shorter while it was read")
        buffer = buffer[count:]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_valid_shape(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor can have this shape: few dimensions, and sizes whose product fits 63 bits."""
    return len(shape) <= MAX_DIMENSIONS and (
        all(type(size) is int and 0 <= size < 2**63 for size in shape)
        and math.prod(max(1, size) for size in shape) < 2**63
    )


def refuse_pointer(path: Path) -> None:
    """Raise `UserError` for a file that is only git-lfs's pointer to a model's file."""
    with open_plain(path) as file:
        if file.read(len(POINTER)) == POINTER:
            raise UserError(f"{path}: only git-lfs's pointer to the file; run `git lfs pull` in its repository")


def check_name(name: str) -> str:
    """Return the same name. Raises ValueError for a name that no model has and that would corrupt a header or a
    terminal."""
    if len(name) > MAX_NAME or not name.isprintable() or name == "__metadata__":
        raise ValueError(f"a tensor called {name!r:.60}")
    name.encode()  # a lone surrogate raises UnicodeEncodeError, which is a ValueError
    return name
