"""Copy tensors from file to file, and compare them."""

import io

import numpy as np

from quantmill.checkpoint.tensor import Tensor


def copy(tensor: Tensor, target: io.FileIO) -> None:
    """Append a tensor's elements, in row-major order, to an unbuffered file. It reads and writes. os.copy_file_range
    took 1.4 times as long when a tensor's offset within a page differs between the two files, as it nearly always does
    (docs/PERFORMANCE.md)."""
    for chunk in tensor.chunks():
        write_all(target, chunk)


def write_all(target: io.FileIO, data: memoryview | bytes) -> None:
    """Write all bytes to an unbuffered file, which may take fewer at a time."""
    view = memoryview(data)
    while view:
        view = view[target.write(view) :]


def equal_bytes(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes, however their files store them. It compares
    bytes, not values: NaN differs from itself, and its payload must be kept."""
    words = np.uint64 if first.nbytes % 8 == 0 else np.uint8  # words compare faster
    return (first.dtype, first.shape) == (second.dtype, second.shape) and all(
        np.array_equal(np.frombuffer(one, words), np.frombuffer(other, words))
        for one, other in zip(first.chunks(), second.chunks(), strict=True)
    )
