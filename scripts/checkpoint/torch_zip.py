"""Read and write `torch.save` zip files without torch, and without running what a pickle says.

The format (torch/csrc/jit/serialization and torch/serialization.py): an uncompressed zip whose `*/data.pkl` pickles the
state_dict (checkpoint/torch_pickle.py) and whose members `*/data/<key>` are the bytes of the storages, each aligned to
64 bytes so that it can be mapped into memory.
"""

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from checkpoint import torch_pickle
from checkpoint.tensor import DTYPE_BYTES, Tensor
from common.program import UserError

MAX_EXPANSION = 64  # bytes of a tensor over those of its storage: strides of zero make terabytes of nothing
MAX_PICKLE = 64 * 2**20  # bytes; the pickle of a shard with 10,000 tensors is about 1 MiB
ALIGNMENT = 64  # bytes, torch's own since 2.1
LOCAL_HEADER = 30  # bytes, before a member's name and extra field
ZIP64_EXTRA = 20  # bytes, that zipfile adds to the extra field of a member that may be large
# what pickle's machine and struct run into where a pickle makes no sense
DAMAGE = (
    *(pickle.UnpicklingError, ValueError, TypeError, AttributeError, IndexError, KeyError, EOFError),
    *(RecursionError, MemoryError, OverflowError, AssertionError, struct.error),
)
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same tensors give the same file


def read(path: Path) -> dict[str, Tensor]:
    """Find the tensors of a .bin (or .pt) file: name -> `Tensor`, in the pickle's order.

    Raises `UserError` for what is not a plain zip checkpoint: legacy pickles, other pickled globals, members that are
    compressed, encrypted or missing, views that reach beyond their storage, entries that are no tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = {info.filename: info for info in archive.infolist()}
            prefix = next((name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")), None)
            if prefix is None:
                raise UserError(f"{path}: a zip file without data.pkl is no torch checkpoint; download it again")
            order = members.get(prefix + "byteorder")
            if order and archive.read(_small(path, order)) != b"little":
                raise UserError(f"{path}: written on a big-endian machine; save it again on a little-endian one")
            state = torch_pickle.loads(archive.read(_small(path, members[prefix + "data.pkl"])))
            return {name: _locate(path, file, members, prefix, name, view) for name, view in _entries(path, state)}
    except zipfile.BadZipFile:
        raise UserError(
            f"{path}: not a whole zip file (an interrupted download, or torch.save's format of before 1.6); "
            "download it again, or load and save it with a current torch"
        ) from None
    except torch_pickle.ForbiddenGlobal as error:
        raise UserError(
            f"{path}: its pickle asks for {error}, which no plain checkpoint needs; refused unrun. "
            "Get the model as safetensors, or save its bare state_dict again"
        ) from None
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, ValueError) else type(error).__name__
        raise UserError(f"{path}: its data.pkl is damaged ({reason:.80}); download it again") from None


def _stored(path: Path, info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """The same member. Raises `UserError` where it is compressed or encrypted."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise UserError(f"{path}: member {info.filename} is compressed or encrypted, which torch never does; refused")
    return info


def _small(path: Path, info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """The same member. Raises `UserError` where reading it whole could take much memory."""
    if info.file_size > MAX_PICKLE:
        raise UserError(f"{path}: {info.filename} is over {MAX_PICKLE >> 20} MiB, which no checkpoint's is; refused")
    return _stored(path, info)


def _entries(path: Path, state: Any) -> list[tuple[str, torch_pickle.View]]:
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a state_dict; save model.state_dict() instead")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch_pickle.View):
            shown = f"{name!r:.60}" if isinstance(name, str) else f"of type {type(name).__name__}"
            raise UserError(f"{path}: entry {shown} is no tensor; save a bare state_dict")
    return list(state.items())


def _locate(
    path: Path,
    file: io.BufferedReader,
    members: dict[str, zipfile.ZipInfo],
    prefix: str,
    name: str,
    view: torch_pickle.View,
) -> Tensor:
    """Check a view against its storage, and the storage against its zip member; find its first byte."""
    info = members.get(f"{prefix}data/{view.storage.key}")
    if info is None:
        raise UserError(f"{path}: the bytes of {name} (member data/{view.storage.key}) are missing; download it again")
    _stored(path, info)
    numbers = (view.offset, *view.shape, *view.stride)
    if any(not isinstance(number, int) or number < 0 for number in numbers) or len(view.shape) != len(view.stride):
        raise UserError(f"{path}: {name} has an impossible shape {view.shape} or stride {view.stride}; refused")
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
    width = DTYPE_BYTES[view.dtype]
    if math.prod(view.shape) * width > MAX_EXPANSION * max(info.file_size, 1):
        raise UserError(f"{path}: {name} repeats its storage more than {MAX_EXPANSION} times; refused")
    if 0 not in view.shape and (last + 1) * width > info.file_size:
        raise UserError(
            f"{path}: {name} reaches beyond its storage ({(last + 1) * width} > {info.file_size} bytes); refused"
        )
    return Tensor(name, view.dtype, view.shape, view.stride, path, _data_start(path, file, info) + view.offset * width)


def _data_start(path: Path, file: io.BufferedReader, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: behind its local header, whose name and extra field have their own lengths."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise UserError(f"{path}: member {info.filename} is not where the zip's directory says; download it again")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start = info.header_offset + 30 + name_length + extra_length
    if start + info.file_size > path.stat().st_size:
        raise UserError(f"{path}: ends inside member {info.filename}; download it again")
    return start


def write(path: Path, tensors: Iterable[Tensor], progress: Callable[[int], None] = lambda count: None) -> None:
    """Write tensors to one file that torch.load(weights_only=True, mmap=True) reads.

    Every tensor gets a contiguous storage of its own; each member carries its CRC32. The same tensors give the same
    bytes.

    Args:
        progress: called with the number of bytes just written.
    """
    tensors = list(tensors)
    pickled = torch_pickle.dumps((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            with archive.open(_member(archive, name), "w", force_zip64=True) as member:
                member.write(data)
        for key, tensor in enumerate(tensors):
            with archive.open(_member(archive, f"data/{key}"), "w", force_zip64=True) as member:
                for chunk in tensor.chunks():
                    member.write(chunk)
                    progress(len(chunk))


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """A member whose bytes will begin at a multiple of `ALIGNMENT`; its extra field is the padding, as torch's is."""
    info = zipfile.ZipInfo(f"archive/{name}", EPOCH)
    info.external_attr = 0o644 << 16
    field_header = 4  # bytes: a field's id and length
    begin = archive.fp.tell() + LOCAL_HEADER + len(info.filename.encode()) + ZIP64_EXTRA + field_header
    padding = -begin % ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return info
