"""Read the metadata and the tensor list of a GGUF file. No weight is read, and no chat template is rendered.

A file is "GGUF", its version, the numbers of tensors and of keys; each key with its value; each tensor's name,
dimensions (the innermost first), type and offset; then the tensors' bytes, each at the next multiple of the alignment.

llama.cpp is C++ and would otherwise be the first to parse an untrusted file. So this reader refuses what ggml's own
(gguf.cpp) refuses, and also what the two could read differently.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from quantmill.checkpoint.ggml_types import TYPES
from quantmill.checkpoint.gguf_header import Header
from quantmill.checkpoint.gguf_names import split_names
from quantmill.checkpoint.tensor import refuse_pointer
from quantmill.common import plain_file
from quantmill.common.plain_file import open_plain
from quantmill.common.program import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 2**16  # a model has some 50
MAX_TENSORS = 2**16  # a layer's experts are one tensor, so that the largest models have 2,000
MAX_KEY = 2**16 - 1  # bytes of its name, the format's own bound
MAX_NAME = 63  # bytes of a tensor's name: ggml keeps 64, of which the last is a NUL
MAX_DIMENSIONS = 4  # ggml's
MIN_KEY_BYTES, MIN_TENSOR_BYTES = 14, 25  # in the file, for one with a name of one letter


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a GGUF file: `shape` in numpy's order, ggml's name of its type, and where its `nbytes` start in
    `path`."""

    name: str
    shape: tuple[int, ...]
    type: str
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Gguf:
    """The contents of a file, or of all files of a split model.

    Attributes:
        path: the file, or the first of several; files: all of them.
        metadata: key -> int, float, bool, str, a numpy array of numbers, or `Texts`.
        tensors: name -> `Tensor`, in the order of the files.
        data_start: the byte of `path` at which its tensors start.
    """

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    data_start: int
    files: tuple[Path, ...]


def read(path: Path) -> Gguf:
    """Read one file. Raises `UserError` if it is not a little-endian GGUF file of version 2 or 3, is cut off or
    damaged, or exceeds the bounds of this module or of gguf_header."""
    with open_plain(path) as file:
        header = Header(path, file)
        version, tensors, keys = _counts(header)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = header.name("key", MAX_KEY, metadata)
            metadata[key] = header.value(key)
        alignment = metadata.get("general.alignment", 32)
        if alignment.bit_count() != 1:
            raise header.refuse(f"its general.alignment is {alignment}, which is not a power of two; refused")
        found: dict[str, Tensor] = {}
        for _ in range(tensors):
            tensor = _tensor(header, found)
            found[tensor.name] = tensor
    start = _up(header.position, alignment)
    end = padded = 0
    for tensor in found.values():
        if tensor.offset != padded:
            raise header.refuse(
                f"{tensor.name} begins at byte {tensor.offset} of the tensors, not at {padded} behind the last one: "
                f"they overlap, leave a gap or are not aligned to {alignment}; refused"
            )
        end = padded + tensor.nbytes
        padded = _up(end, alignment)
    least = start + end if found else header.position
    if not least <= header.size <= start + padded:
        raise header.refuse(f"has {header.size} bytes where its header claims {least}; download it again")
    placed = {name: replace(tensor, offset=start + tensor.offset) for name, tensor in found.items()}
    return Gguf(path, version, alignment, metadata, placed, start, (path,))


def _counts(header: Header) -> tuple[int, int, int]:
    """Read a file's version, number of tensors and number of keys."""
    if header.size < 24:
        raise header.refuse("is not a GGUF file; download it again")
    magic, version, tensors, keys = header.unpack("<4sIQQ")
    if magic != MAGIC:
        refuse_pointer(header.path)
        raise header.refuse(f"is not a GGUF file: it begins with {magic!r}; download it again")
    if version & 0xFFFF == 0:
        raise header.refuse("is big-endian; take the little-endian file, or convert it with gguf_convert_endian.py")
    if version not in VERSIONS:
        raise header.refuse(f"is GGUF version {version}, and 2 and 3 are known; convert the model again")
    left = header.size - header.position
    for what, count, bound in (
        ("tensors", tensors, min(MAX_TENSORS, left // MIN_TENSOR_BYTES)),
        ("keys", keys, min(MAX_KEYS, left // MIN_KEY_BYTES)),
    ):
        if count > bound:
            raise header.refuse(f"claims {count} {what}, more than it can hold; download it again")
    return version, tensors, keys


def _tensor(header: Header, taken: dict[str, Any]) -> Tensor:
    """Read a tensor; its offset counts from the first tensor's."""
    name = header.name("tensor", MAX_NAME, taken)
    (rank,) = header.unpack("<I")
    if rank > MAX_DIMENSIONS:
        raise header.refuse(f"{name} has {rank} dimensions, and ggml's tensors up to {MAX_DIMENSIONS}; refused")
    shape = header.unpack(f"<{rank}Q")[::-1]
    if prod(max(1, size) for size in shape) >= 2**63:
        raise header.refuse(f"{name} has impossible dimensions {list(shape)}; download it again")
    number, offset = header.unpack("<IQ")
    if number not in TYPES:
        raise header.refuse(f"{name} is of type {number}, which ggml does not have (any more); convert the model again")
    stored = TYPES[number]
    row = shape[-1] if shape else 1
    if row % stored.block:
        raise header.refuse(f"{name} is {stored.name} and has rows of {row}, no multiple of {stored.block}; refused")
    return Tensor(name, shape, stored.name, header.path, offset, prod(shape) // stored.block * stored.nbytes)


def _up(place: int, alignment: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-place // alignment) * alignment


def parts(path: Path) -> list[Path]:
    """Return all files of the model that `path` belongs to. Raises `UserError` if one is missing."""
    found = [path.with_name(name) for name in split_names(path.name)]
    for each in found:
        if not plain_file.is_there(each):
            what = f"is missing, one of {len(found)} files" if len(found) > 1 else "there is no such file"
            raise UserError(f"{each}: {what}; download it")
    return found


def read_all(path: Path) -> Gguf:
    """Read a model's file, or all files of a split model; `path` is any of them. Raises `UserError` as `read` does, and
    if a file is missing or belongs to another model."""
    paths = parts(path)
    first = read(paths[0])
    tensors: dict[str, Tensor] = {}
    for number, each in enumerate(paths):
        part = read(each) if number else first
        said = [part.metadata.get("split.no", 0), part.metadata.get("split.count") or 1]
        if said != [number, len(paths)]:
            mine = f"part {number + 1} of {len(paths)}"
            raise UserError(f"{each}: is {mine} by its name and {said[0] + 1} of {said[1]} by its metadata; rename it")
        for name in part.tensors:
            if name in tensors:
                raise UserError(f"{each}: {name} is also in {tensors[name].path.name}; only one of them can be right")
        tensors |= part.tensors
        if len(tensors) > MAX_TENSORS:
            raise UserError(f"{each}: goes beyond {MAX_TENSORS} tensors, which no model has; refused")
    told = first.metadata.get("split.tensors.count")
    if len(paths) > 1 and told != len(tensors):
        raise UserError(f"{path}: its files hold {len(tensors)} tensors, and the first claims {told}; download them")
    return replace(first, tensors=tensors, files=tuple(paths))
