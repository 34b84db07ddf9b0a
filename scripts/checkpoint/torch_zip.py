"""Read `torch.save` zip files without torch, and without running what a pickle says.

The format (torch/csrc/jit/serialization and torch/serialization.py): an uncompressed zip whose `*/data.pkl` pickles a
dict of name -> `_rebuild_tensor_v2(storage, offset, size, stride, …)`; a storage is a persistent id
("storage", type, key, location, elements) whose bytes are the member `*/data/<key>`.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.tensor import DTYPE_BYTES, Tensor
from common.program import UserError

MAX_PICKLE = 64 * 2**20  # bytes; the pickle of a shard with 10,000 tensors is about 1 MiB

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


@dataclass(frozen=True)
class _StorageType:
    dtype: str


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    elements: int


@dataclass(frozen=True)
class _View:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_tensor(storage: _Storage, offset: int, size: tuple, stride: tuple, *_: Any) -> _View:
    """Stand-in for torch._utils._rebuild_tensor_v2: notes where the elements are instead of loading them."""
    return _View(storage, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data: _View, *_: Any) -> _View:
    return data


_GLOBALS = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): _StorageType(dtype) for name, dtype in STORAGE_DTYPES.items()},
}


class _Unpickler(pickle._Unpickler):
    """The pure-Python unpickler (the C one allocates what a memo index asks for) with nothing else to call."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise UserError(
                f"{self.path}: its pickle asks for {module}.{name}, which no plain checkpoint needs; refused unrun. "
                "Get the model as safetensors, or save its bare state_dict again"
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _location, elements = pid
        if kind != "storage" or not isinstance(storage_type, _StorageType):
            raise ValueError("unknown persistent id")
        return _Storage(storage_type.dtype, str(key), int(elements))


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
            if order and archive.read(order) != b"little":
                raise UserError(f"{path}: written on a big-endian machine; save it again on a little-endian one")
            if members[prefix + "data.pkl"].file_size > MAX_PICKLE:
                raise UserError(
                    f"{path}: its data.pkl is over {MAX_PICKLE >> 20} MiB, which no checkpoint's is; refused"
                )
            state = _Unpickler(archive.read(prefix + "data.pkl"), path).load()
            return {name: _locate(path, file, members, prefix, name, view) for name, view in _entries(path, state)}
    except zipfile.BadZipFile:
        raise UserError(
            f"{path}: not a whole zip file (an interrupted download, or torch.save's format of before 1.6); "
            "download it again, or load and save it with a current torch"
        ) from None
    except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, IndexError, KeyError, EOFError) as error:
        raise UserError(f"{path}: its data.pkl is damaged ({error!r:.80}); download it again") from None


def _entries(path: Path, state: Any) -> list[tuple[str, _View]]:
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a state_dict; save model.state_dict() instead")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, _View):
            raise UserError(f"{path}: entry {name!r:.60} is no tensor; save a bare state_dict")
    return list(state.items())


def _locate(
    path: Path, file: io.BufferedReader, members: dict[str, zipfile.ZipInfo], prefix: str, name: str, view: _View
) -> Tensor:
    """Check a view against its storage, and the storage against its zip member; find its first byte."""
    info = members.get(f"{prefix}data/{view.storage.key}")
    if info is None:
        raise UserError(f"{path}: the bytes of {name} (member data/{view.storage.key}) are missing; download it again")
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise UserError(f"{path}: member {info.filename} is compressed or encrypted, which torch never does; refused")
    numbers = (view.offset, *view.shape, *view.stride)
    if any(not isinstance(number, int) or number < 0 for number in numbers) or len(view.shape) != len(view.stride):
        raise UserError(f"{path}: {name} has an impossible shape {view.shape} or stride {view.stride}; refused")
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
    width = DTYPE_BYTES[view.storage.dtype]
    if 0 not in view.shape and (last + 1) * width > info.file_size:
        raise UserError(
            f"{path}: {name} reaches beyond its storage ({(last + 1) * width} > {info.file_size} bytes); refused"
        )
    return Tensor(
        name, view.storage.dtype, view.shape, view.stride, path, _data_start(path, file, info) + view.offset * width
    )


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
