"""Read and write safetensors files in constant memory.

The format (https://github.com/huggingface/safetensors#format): eight bytes of little-endian header length, a JSON
header {name: {dtype, shape, data_offsets}}, then the tensors' bytes. As the official writer does, tensors are ordered
by falling dtype and then by name, and the header is padded with spaces to a multiple of eight bytes.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from checkpoint.tensor import DTYPE_BYTES, Tensor, row_major
from common.program import UserError

MAX_HEADER = 100_000_000  # bytes, the official reader's own limit


def read(path: Path) -> dict[str, Tensor]:
    """Find the tensors of a safetensors file: name -> `Tensor`, in the header's order.

    Raises `UserError` where the header is cut off, is no JSON, names an unknown dtype, or disagrees with the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER + 1
        if length > min(MAX_HEADER, size - 8):
            raise UserError(
                f"{path}: cut off, or no safetensors file (its header does not fit in it); download it again"
            )
        try:
            header = json.loads(file.read(length))
            entries = {
                name: _entry(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: its header is damaged ({error!r:.80}); download it again") from None
    end = 8 + length
    for tensor in sorted(entries.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            raise UserError(f"{path}: the bytes of {tensor.name} overlap another tensor's or leave a gap; refused")
        end = tensor.start + tensor.nbytes
    if end != size:
        raise UserError(f"{path}: is {size} bytes where its header tells of {end}; download it again")
    return entries


def _entry(path: Path, name: str, entry: dict[str, Any], data_start: int) -> Tensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in DTYPE_BYTES:
        raise UserError(f"{path}: {name} has dtype {entry['dtype']!r:.20}, which Quantmill does not know; refused")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name}: negative or fractional sizes")
    tensor = Tensor(name, entry["dtype"], shape, row_major(shape), path, data_start + begin)
    if end - begin != tensor.nbytes:
        raise ValueError(f"{name}: offsets disagree with its shape")
    return tensor


def write(
    path: Path,
    tensors: Iterable[Tensor],
    *,
    dtype: Callable[[Tensor], str] = lambda tensor: tensor.dtype,
    chunks: Callable[[Tensor], Iterator[memoryview]] = Tensor.chunks,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Write tensors to one file, byte for byte what `safetensors.torch.save_file(…, metadata={"format": "pt"})` writes.

    Args:
        dtype: the dtype to store a tensor in; chunks: its bytes in that dtype, in pieces. Together they convert.
        progress: called with the number of bytes just written.
    """
    ranks = {name: rank for rank, name in enumerate(DTYPE_BYTES)}
    order = sorted(tensors, key=lambda tensor: (-ranks[dtype(tensor)], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in order:
        begin, end = end, end + tensor.numel * DTYPE_BYTES[dtype(tensor)]
        header[tensor.name] = {"dtype": dtype(tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in order:
            for chunk in chunks(tensor):
                file.write(chunk)
                progress(len(chunk))
        if file.tell() != 8 + len(encoded) + end:
            raise OSError(f"{path}: {file.tell()} bytes were written where {8 + len(encoded) + end} were due")
