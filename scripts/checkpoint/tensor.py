"""Where one tensor lies on disk: the common ground of the readers and the writers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHUNK = 512 * 1024  # bytes; larger buffers fall out of the L2 cache and are slower

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
    """A tensor inside a file.

    Attributes:
        dtype: safetensors' name, e.g. `BF16`.
        shape, stride: in elements; a stride as torch has it.
        path: the file; start: the byte in it where element 0 lies.
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
    def nbytes(self) -> int:
        """Bytes of the tensor's own elements, laid out without gaps."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in the file in row-major order without gaps."""
        return self.numel == 0 or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.stride, row_major(self.shape), strict=True)
        )

    def chunks(self) -> Iterator[memoryview]:
        """The elements in row-major order, little-endian, a piece at a time; each piece is valid until the next."""
        if self.contiguous:
            yield from self._contiguous_chunks()
        else:
            yield from self._gathered_chunks()

    def _contiguous_chunks(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(CHUNK, self.nbytes)))
        left = self.nbytes
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while left:
                read = file.readinto(buffer[: min(CHUNK, left)])
                if not read:
                    raise EOFError(f"{self.path} ended {left} bytes before the end of {self.name}")
                yield buffer[:read]
                left -= read

    def _gathered_chunks(self) -> Iterator[memoryview]:
        """Through a memory map, in pieces of at most `CHUNK` bytes, whichever the dimensions."""
        element = f"V{DTYPE_BYTES[self.dtype]}"
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        storage = np.memmap(self.path, dtype=element, mode="r", offset=self.start, shape=(last + 1,))
        strides = tuple(stride * storage.itemsize for stride in self.stride)
        view = np.lib.stride_tricks.as_strided(storage, self.shape, strides, writeable=False)
        for piece in _pieces(view):
            yield memoryview(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))


def _pieces(view: np.ndarray) -> Iterator[np.ndarray]:
    """Parts of an array, in row-major order, of at most `CHUNK` bytes each."""
    if view.nbytes <= CHUNK:
        yield view
    elif view.ndim == 1:
        step = CHUNK // view.itemsize
        yield from (view[low : low + step] for low in range(0, len(view), step))
    else:
        for part in view:
            yield from _pieces(part)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
