"""Find weights that are NaN or infinite. Every tensor is read, including those that no text would use."""

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from quantmill.checkpoint.copying import write_all
from quantmill.checkpoint.tensor import DTYPE_BYTES, Tensor
from quantmill.common.program import UserError

# dtype -> integers of its parts' width, and the least bit pattern, without the sign, of NaN and infinity: all bits of
# the exponent are set. F8_E4M3 has no infinities; F8_E8M0 has no sign and one NaN.
PATTERNS = {
    "F64": ("<i8", 0x7FF0000000000000),
    "F32": ("<i4", 0x7F800000),
    "C64": ("<i4", 0x7F800000),
    "F16": ("<i2", 0x7C00),
    "BF16": ("<i2", 0x7F80),
    "F8_E5M2": ("i1", 0x7C),
    "F8_E4M3": ("i1", 0x7F),
    "F8_E8M0": ("i1", 0xFF),
}


def first_not_finite(data: memoryview, dtype: str) -> int | None:
    """Return the first element of little-endian bytes that is NaN or infinite; None if all are finite. As integers, the
    bit patterns of such elements are the largest ones, of negative elements among the unsigned. Two maxima find them
    for any type at the speed of the cache; numpy's isfinite takes 20 times as long for float16."""
    if dtype not in PATTERNS or not data:
        return None
    kind, least = PATTERNS[dtype]
    signed = np.frombuffer(data, kind)
    unsigned = signed.view(kind.replace("i", "u"))
    sign = 0 if dtype == "F8_E8M0" else 1 << (8 * signed.itemsize - 1)
    if unsigned.max() < sign + least and (not sign or signed.max() < least):
        return None
    magnitude = unsigned & (unsigned.dtype.type(sign - 1) if sign else unsigned.dtype.type(0xFF))
    return int(np.argmax(magnitude >= least)) * signed.itemsize // DTYPE_BYTES[dtype]


def first_place(tensor: Tensor) -> list[int] | None:
    """Return the indices of a stored tensor's first element that is NaN or infinite; None if all are finite."""
    done = 0
    for chunk in tensor.chunks():
        if (found := first_not_finite(chunk, tensor.dtype)) is not None:
            return [int(index) for index in np.unravel_index(done + found, tensor.shape)]
        done += len(chunk) // DTYPE_BYTES[tensor.dtype]
    return None


def copy(tensor: Tensor, target: io.FileIO) -> None:
    """Append a tensor's elements to a file, as `copying.copy`. Raises `UserError` for NaN and infinity."""
    for chunk in _finite_chunks(tensor, tensor):
        write_all(target, chunk)


def sha256(path: Path, tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of a safetensors file; check for NaN and infinity in the same pass, since reading dominates.

    Args:
        tensors: all that the file holds. Errors name their paths, which may be those of another copy.

    Raises `UserError` for NaN and infinity.
    """
    ordered = sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes))
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(ordered[0].start))
    for tensor in ordered:  # without gaps, to the file's end: see safetensors_file.read
        for chunk in _finite_chunks(tensor, replace(tensor, path=path)):
            digest.update(chunk)
    return digest.hexdigest()


def _finite_chunks(named: Tensor, read: Tensor) -> Iterator[memoryview]:
    place = 0
    for chunk in read.chunks():
        found = first_not_finite(chunk, read.dtype) if named.is_weight else None  # masks hold infinities
        if found is not None:
            where = [int(index) for index in np.unravel_index(place + found, read.shape)]
            raise UserError(
                f"{named.path}: {named.name} is NaN or infinite at {where}, which is not a weight; download it again"
            )
        yield chunk
        place += len(chunk) // DTYPE_BYTES[read.dtype]
