"""Read and write safetensors files in constant memory.

The format (https://github.com/huggingface/safetensors#format): eight bytes of little-endian header length, a JSON
header {name: {dtype, shape, data_offsets}}, then the tensors' bytes. As the official writer does, tensors are ordered
by falling dtype and then by name, and the header is padded with spaces to a multiple of eight bytes.
"""

import io
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantmill.checkpoint.copying import copy, write_all
from quantmill.checkpoint.tensor import DTYPE_BYTES, Tensor, check_name, is_valid_shape, refuse_pointer, row_major
from quantmill.common import bounded_json
from quantmill.common.plain_file import open_plain
from quantmill.common.program import UserError


def read(path: Path) -> dict[str, Tensor]:
    """Find the tensors of a safetensors file: name -> `Tensor`, in the header's order. Raises `UserError` if the header
    is cut off, is not JSON, names an unknown dtype, or disagrees with the file."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            refuse_pointer(path)
            raise UserError(
                f"{path}: cut off, or not a safetensors file (its header does not fit in it); download it again"
            )
        try:
            header = bounded_json.loads(file.read(min(length, bounded_json.MAX_BYTES + 1)))
            entries = {
                name: _entry(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path}: its header is damaged ({error!r:.80}); download it again") from None
    end = 8 + length
    for tensor in sorted(entries.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            raise UserError(f"{path}: the bytes of {tensor.name} overlap another tensor's or leave a gap; refused")
        end = tensor.start + tensor.nbytes
    if end != size:
        raise UserError(f"{path}: is {size} bytes where its header claims {end}; download it again")
    return entries


def notes(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file that `read` accepted, without the framework's `format`."""
    with open_plain(path) as file:
        header = bounded_json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    found = header.get("__metadata__", {})
    return {key: value for key, value in found.items() if isinstance(value, str) and key != "format"}


def _entry(path: Path, name: str, entry: dict[str, Any], data_start: int) -> Tensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in DTYPE_BYTES:
        raise UserError(f"{path}: {name} has dtype {entry['dtype']!r:.20}, which Quantmill does not know; refused")
    if not is_valid_shape(shape) or any(type(number) is not int or not 0 <= number < 2**63 for number in (begin, end)):
        raise ValueError(f"{name:.60}: sizes that cannot be")
    tensor = Tensor(check_name(name), entry["dtype"], shape, row_major(shape), path, data_start + begin)
    if end - begin != tensor.nbytes:
        raise ValueError(f"{name:.60}: offsets disagree with its shape")
    return tensor


def write(
    path: Path,
    tensors: Iterable[Tensor],
    *,
    dtype: Callable[[Tensor], str] = lambda tensor: tensor.dtype,
    copy: Callable[[Tensor, io.FileIO], None] = copy,
    progress: Callable[[int], None] = lambda count: None,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write tensors to one file, byte for byte what `safetensors.torch.save_file(…, metadata={"format": "pt"})` writes.

    Args:
        dtype: the dtype to store a tensor in; copy: appends its elements in that dtype. Together they convert.
        progress: called with the number of bytes just written. notes: further metadata for the header.
    """
    ranks = {name: rank for rank, name in enumerate(DTYPE_BYTES)}
    order = sorted(tensors, key=lambda tensor: (-ranks[dtype(tensor)], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **dict(sorted(notes.items()))}}
    end = 0
    for tensor in order:
        begin, end = end, end + tensor.numel * DTYPE_BYTES[dtype(tensor)]
        header[tensor.name] = {"dtype": dtype(tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb", buffering=0) as file:
        write_all(file, struct.pack("<Q", len(encoded)) + encoded)
        for tensor in order:
            copy(tensor, file)
            progress(tensor.numel * DTYPE_BYTES[dtype(tensor)])
        if file.tell() != 8 + len(encoded) + end:
            raise OSError(f"{path}: {file.tell()} bytes were written where {8 + len(encoded) + end} were expected")
