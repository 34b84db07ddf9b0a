"""Copy tensors from file to file, and compare them."""

import io

import numpy as np

from quantmill.checkpoint.tensor import Tensor


def copy(tensor: Tensor, target: io.FileIO) -> None:
    """Append a tensor's elements, in row-major order, to an unbuffered file.

    Reads and writes, not os.copy_file_range: where the tensor lies otherwise in the two files' pages, as nearly always,
    the kernel's own copy took 1.4 times as long (docs/PERFORMANCE.md).
    """
    for chunk in tensor.chunks():
        write_all(target, chunk)


def write_all(target: io.FileIO, data: memoryview | bytes) -> None:
    """Write every byte to an unbuffered file, which may take fewer at a time."""
    view = memoryview(data)
    while view:
        view = view[target.write(view) :]


def equal_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, however either lies in its file.

    Bytes, not values: a NaN differs from itself, and its payload is to be kept.
    """
    return (first.dtype, first.shape) == (second.dtype, second.shape) and all(
        np.array_equal(_words(one), _words(other)) for one, other in zip(first.chunks(), second.chunks(), strict=True)
    )


def _words(data: memoryview) -> np.ndarray:
    """The bytes as 64-bit numbers where that comes out even: faster to compare."""
    return np.frombuffer(data, np.uint64 if len(data) % 8 == 0 else np.uint8)
