"""Read and write `torch.save` zip files without torch, and without running a pickle.

The format (torch/csrc/jit/serialization and torch/serialization.py): an uncompressed zip whose `*/data.pkl` pickles the
state_dict (checkpoint/torch_pickle.py) and whose members `*/data/<key>` are the bytes of the storages, each aligned to
64 bytes so that it can be mapped into memory.
"""

import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from quantmill.checkpoint import torch_pickle, zip_directory
from quantmill.checkpoint.copying import copy, write_all
from quantmill.checkpoint.tensor import DTYPE_BYTES, Tensor, check_name, is_valid_shape, refuse_pointer, row_major
from quantmill.checkpoint.zip_directory import Member, crc32
from quantmill.checkpoint.zip_writer import ZipWriter
from quantmill.common.plain_file import open_plain
from quantmill.common.program import UserError

MAX_EXPANSION = 64  # bytes of all tensors over those of the file: strides of zero repeat few bytes into terabytes
MAX_TENSORS_A_FILE = 25_000  # whose pickle is within torch_pickle's bounds for certain
MAX_PICKLE = 8 * 2**20  # bytes; the pickle of a shard with 10,000 tensors is about 1 MiB
# exceptions of pickle's machine and struct on damaged pickles
DAMAGE = (
    *(pickle.UnpicklingError, ValueError, TypeError, AttributeError, IndexError, KeyError, EOFError),
    *(RecursionError, MemoryError, OverflowError, AssertionError, struct.error),
)


def read(path: Path) -> dict[str, Tensor]:
    """Find the tensors of a .bin (or .pt) file: name -> `Tensor`, in the pickle's order. Raises `UserError` for
    anything but a plain zip checkpoint: legacy pickles, other pickled globals, members that are compressed, encrypted,
    overlapping or missing, views beyond their storage, entries that are not tensors."""
    try:
        members = zip_directory.read(path)
        prefixes = [name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")]
        if not prefixes:
            raise UserError(f"{path}: a zip file without data.pkl is not a torch checkpoint; download it again")
        if len(prefixes) > 1:
            raise UserError(f"{path}: holds two data.pkl, and one is expected; refused")
        prefix = prefixes[0]
        order = members.get(prefix + "byteorder")
        if order and _bytes(path, order) != b"little":
            raise UserError(f"{path}: written on a big-endian machine; save it again on a little-endian one")
        state = torch_pickle.loads(_bytes(path, members[prefix + "data.pkl"]))
        tensors = {name: _locate(path, members, prefix, name, view) for name, view in _entries(path, state)}
    except zipfile.BadZipFile:
        raise UserError(f"{path}: {_instead_of_a_zip(path)}") from None
    except torch_pickle.ForbiddenGlobal as error:
        raise UserError(
            f"{path}: its pickle asks for {error!s:.80}, which no plain checkpoint needs; refused unrun. "
            "Get the model as safetensors, or save its bare state_dict again"
        ) from None
    except torch_pickle.TooLong:
        raise UserError(
            f"{path}: its data.pkl is longer than that of {MAX_TENSORS_A_FILE} tensors; save the model in more files"
        ) from None
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, ValueError) else type(error).__name__
        raise UserError(f"{path}: its data.pkl is damaged ({reason:.80}); download it again") from None
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_EXPANSION * path.stat().st_size:
        raise UserError(f"{path}: its tensors repeat its bytes more than {MAX_EXPANSION} times; refused")
    return tensors


def check(path: Path) -> None:
    """Read every byte of a .bin. Raises `UserError` for a member with a wrong CRC32."""
    for member in zip_directory.read(path).values():
        zip_directory.check_crc(path, member)


def _instead_of_a_zip(path: Path) -> str:
    """Return what a file that is not a zip is, and what to do about it."""
    refuse_pointer(path)
    with open_plain(path) as file:
        begin = file.read(1)
    if begin == b"\x80":
        return (
            "a bare pickle, as torch.save wrote before 1.6, which only torch reads; save it again with "
            f"torch.save(torch.load({path.name!r}, weights_only=True), {path.name!r})"
        )
    return "not a whole zip file, perhaps an interrupted download; download it again"


def _bytes(path: Path, member: Member) -> bytes:
    """Read a small member. Raises `UserError` if it is too large or its CRC32 is wrong."""
    if member.size > MAX_PICKLE:
        raise UserError(f"{path}: {member.name:.80} is over {MAX_PICKLE >> 20} MiB, which no checkpoint's is; refused")
    zip_directory.check_crc(path, member)
    with open_plain(path) as file:
        file.seek(member.start)
        return file.read(member.size)


def _entries(path: Path, state: Any) -> list[tuple[str, torch_pickle.View]]:
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a state_dict; save model.state_dict() instead")
    for name, value in state.items():
        if not isinstance(value, torch_pickle.View):
            raise UserError(f"{path}: entry {name!r:.60} is not a tensor; save a bare state_dict")
        check_name(name)
    return list(state.items())


def _locate(path: Path, members: dict[str, Member], prefix: str, name: str, view: torch_pickle.View) -> Tensor:
    """Check a view against its storage, and the storage against its zip member. Find its first byte."""
    member = members.get(f"{prefix}data/{view.storage.key}")
    if member is None:
        raise UserError(
            f"{path}: the bytes of {name} (member data/{view.storage.key:.20}) are missing; download it again"
        )
    numbers = (view.offset, *view.shape, *view.stride)
    if any(type(number) is not int or number < 0 for number in numbers) or (
        len(view.shape) != len(view.stride) or not is_valid_shape(view.shape)
    ):
        raise UserError(f"{path}: {name} has an impossible shape or stride ({view.shape!r:.60}); refused")
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
    width = DTYPE_BYTES[view.dtype]
    size = min(member.size, view.storage.nbytes)
    if 0 in view.shape:
        return Tensor(name, view.dtype, view.shape, row_major(view.shape), path, member.start)
    if (last + 1) * width > size:
        raise UserError(f"{path}: {name} reaches beyond its storage ({(last + 1) * width} > {size} bytes); refused")
    distinct = math.prod(count for count, step in zip(view.shape, view.stride, strict=True) if step)
    if distinct * width > size:
        raise UserError(f"{path}: {name} overlaps itself, which no weight does; refused")
    return Tensor(name, view.dtype, view.shape, view.stride, path, member.start + view.offset * width)


def write(path: Path, tensors: Iterable[Tensor], progress: Callable[[int], None] = lambda count: None) -> None:
    """Write tensors to one file that torch.load(weights_only=True, mmap=True) reads.

    Every tensor gets a contiguous storage of its own; each member carries its CRC32. The same tensors give the same
    bytes.

    Args:
        progress: called with the number of bytes just written.
    """
    tensors = list(tensors)
    pickled = torch_pickle.dumps((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    with path.open("wb", buffering=0) as file:
        archive = ZipWriter(file)
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            archive.begin(f"archive/{name}", len(data), crc32(data))
            write_all(file, data)
        for key, tensor in enumerate(tensors):
            archive.begin(f"archive/data/{key}", tensor.nbytes, _crc(tensor))
            copy(tensor, file)
            progress(tensor.nbytes)
        archive.finish()


def _crc(tensor: Tensor) -> int:
    crc = 0
    for chunk in tensor.chunks():
        crc = crc32(chunk, crc)
    return crc
