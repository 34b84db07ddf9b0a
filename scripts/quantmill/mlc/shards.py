"""MLC-LLM's weight files (params_shard_*.bin) and their index (tensor-cache.json).

The place of every byte is known before the first is calculated, so that any number of threads write blocks of rows of
any tensor. No tensor is ever whole in memory.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint.copying import write_all
from quantmill.checkpoint.float16 import as_float
from quantmill.checkpoint.shards import read_json
from quantmill.checkpoint.tensor import DTYPE_BYTES, Tensor, read_into
from quantmill.common.program import UserError
from quantmill.devices.cpu import available_threads
from quantmill.mlc.parameters import Parameter
from quantmill.mlc.quantize import INFINITY, MAGNITUDE, quantize

CACHE = "tensor-cache.json"
MAX_INDEX = 64 * 2**20  # bytes of it
SHARD_BYTES = 32 * 2**20
LABEL = "f32-to-bf16"  # MLC-LLM's name of the encoding of every tensor, whatever its dtype
BLOCK = 2**18  # weights at a time: they fit the processor's cache, and calls are few
TASK = 2**23  # weights that one thread takes at a time
MAX_WORKERS = 16  # each holds about 10 MB


@dataclass(frozen=True)
class Record:
    """A stored tensor: its bytes begin at byte `offset` of its shard."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def plan(parameters: Sequence[Parameter]) -> list[list[Record]]:
    """Return the records of each shard, as TVM's TensorCacheShardingManager cuts them.

    Tensors are added to a pending shard while it stays under `SHARD_BYTES`. A tensor that does not fit gets a shard of
    its own if it has at least half of that, numbered before the pending one; otherwise it begins the next shard.
    """
    finished: list[list[Record]] = []
    pending: list[Record] = []
    size = 0
    for parameter in parameters:
        for name, (shape, dtype) in parameter.stored().items():
            record = Record(name, shape, dtype, 0)
            if size + record.nbytes >= SHARD_BYTES:
                if 2 * record.nbytes >= SHARD_BYTES:
                    finished.append([record])
                    continue
                finished.append(pending)
                pending, size = [], 0
            pending.append(replace(record, offset=size))
            size += record.nbytes
    return [*finished, pending] if pending else finished


def write(
    folder: Path,
    parameters: Sequence[Parameter],
    counted: int,
    progress: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Write all weight files and their index. Return the names of the weight files.

    Args:
        counted: the number of weights for the index's bits per weight.
        progress: called, from several threads, with the number of weights just written.

    Raises `UserError` if a weight is not a finite float16.
    """
    shards = {f"params_shard_{number}.bin": records for number, records in enumerate(plan(parameters))}
    for name, records in shards.items():
        with (folder / name).open("wb") as file:
            file.truncate(records[-1].offset + records[-1].nbytes)
    places = {record.name: (folder / name, record) for name, records in shards.items() for record in records}
    total = float(sum(record.nbytes for _, record in places.values()))
    with ThreadPoolExecutor(min(MAX_WORKERS, available_threads())) as workers:
        try:
            tasks: dict[str, list[Future]] = {name: [] for name in shards}
            hashes: dict[str, Future] = {}
            for parameter in parameters:
                targets = [places[name] for name in parameter.stored()]
                started = [
                    workers.submit(_write_rows, piece, parameter.quantized, targets, progress)
                    for piece in _cut(parameter)
                ]
                for path, record in targets:
                    tasks[path.name] += started
                    if record is shards[path.name][-1]:
                        hashes[path.name] = workers.submit(_md5_after, tasks[path.name], path)
            for future in [future for futures in tasks.values() for future in futures]:
                future.result()
            content = {
                "metadata": {"ParamSize": len(places), "ParamBytes": total, "BitsPerParam": total * 8.0 / counted},
                "records": [_shard(name, records, hashes[name].result()) for name, records in shards.items()],
            }
        except BaseException:
            workers.shutdown(cancel_futures=True)
            raise
    with (folder / CACHE).open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=4)
    return list(shards)


def read(folder: Path, wanted: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, np.ndarray]:
    """Return the parameters of `wanted` (name -> shape, dtype) in its order, memory-mapped.

    Raises `UserError` if one is missing, of another shape or type, or beyond its shard.
    """
    found: dict[str, np.ndarray] = {}
    index, again = folder / CACHE, "build the artifact again"
    try:
        for shard in read_json(index, MAX_INDEX)["records"]:
            path = folder / Path(shard["dataPath"]).name
            data = np.memmap(path, np.uint8, "r")
            for record in shard["records"]:
                start, end = record["byteOffset"], record["byteOffset"] + record["nbytes"]
                if start < 0 or end > len(data):
                    raise UserError(f"{path}: is too short for {record['name']}; {again}")
                found[record["name"]] = data[start:end].view(record["dtype"]).reshape(record["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{index}: is damaged ({error!r:.80}); {again}") from None
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            raise UserError(f"{index}: lacks {name}, which the model's config asks for; {again}")
        there = found[name]
        if there.shape != shape or there.dtype != dtype:
            kinds = f"{there.dtype} {list(there.shape)}, not {dtype} {list(shape)}"
            raise UserError(f"{index}: {name} is {kinds}; {again}")
    return {name: found[name] for name in wanted}


def bytes_per_token(folder: Path) -> int:
    """Bytes of weights that one decoded token reads: all but the embeddings, unless they are the head too."""
    content = json.loads((folder / CACHE).read_text(encoding="utf-8"))
    records = {record["name"]: record["nbytes"] for shard in content["records"] for record in shard["records"]}
    untied = any(name.startswith("lm_head.") for name in records)
    return sum(size for name, size in records.items() if not (untied and name.startswith("model.embed_tokens.")))


@dataclass(frozen=True)
class _Rows:
    """Rows `begin` to `end` of a part of a parameter; the part begins at the parameter's row `before`."""

    part: Tensor
    before: int
    begin: int
    end: int


def _cut(parameter: Parameter) -> list[_Rows]:
    """All rows of a parameter, about `TASK` weights at a time."""
    pieces, before = [], 0
    for part in parameter.parts:
        rows = max(1, TASK // math.prod(part.shape[1:]))
        cuts = range(0, part.shape[0], rows)
        pieces += [_Rows(part, before, cut, min(cut + rows, part.shape[0])) for cut in cuts]
        before += part.shape[0]
    return pieces


def _write_rows(
    piece: _Rows, quantized: bool, targets: Sequence[tuple[Path, Record]], progress: Callable[[int], None]
) -> None:
    """Quantize or convert some rows and write them to their places in the tensors that they are stored as."""
    part = piece.part
    inputs = math.prod(part.shape[1:])
    rows = max(1, BLOCK // inputs)
    with ExitStack() as stack:
        source = stack.enter_context(part.path.open("rb", buffering=0))
        files = [stack.enter_context(path.open("rb+", buffering=0)) for path, _ in targets]
        source.seek(part.start + piece.begin * inputs * DTYPE_BYTES[part.dtype])
        for file, (_, record) in zip(files, targets, strict=True):
            file.seek(record.offset + (piece.before + piece.begin) * (record.nbytes // record.shape[0]))
        for first in range(piece.begin, piece.end, rows):
            count = min(rows, piece.end - first)
            data = np.empty(count * inputs * DTYPE_BYTES[part.dtype], np.uint8).data
            read_into(source, data)
            weights = to_float16(data, part.dtype).reshape(count, inputs)
            try:
                arrays = quantize(weights) if quantized else (finite(weights),)
            except ValueError:
                raise UserError(
                    f"{part.path}: {part.name} holds NaN, infinity or weights beyond 65,504, which float16 cannot "
                    "hold; leave mlc out of this model's formats, or download it again"
                ) from None
            for file, array in zip(files, arrays, strict=True):
                write_all(file, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            progress(weights.size)


def to_float16(data: memoryview, dtype: str) -> np.ndarray:
    """Little-endian weights -> uint16, the bits of the nearest float16; infinity beyond 65,504."""
    if dtype == "F16":
        return np.frombuffer(data, "<u2")
    if dtype == "BF16":
        return _float16_of_bfloat16().take(np.frombuffer(data, "<u2"))
    with np.errstate(over="ignore"):
        return as_float(data, dtype).astype(np.float16).view(np.uint16)


@cache
def _float16_of_bfloat16() -> np.ndarray:
    """Convert every bfloat16 to float16, uint16 [65536]; a look-up is four times as fast as two conversions."""
    every = np.arange(2**16, dtype="<u2")
    with np.errstate(over="ignore", invalid="ignore"):
        return as_float(every.view(np.uint8).data, "BF16").astype(np.float16).view(np.uint16)


def finite(weights: np.ndarray) -> np.ndarray:
    """Return bits of float16 unchanged. Raises ValueError if one is infinite or NaN."""
    if (weights & MAGNITUDE).max(initial=0) >= INFINITY:
        raise ValueError("not finite")
    return weights


def _md5_after(tasks: Sequence[Future], path: Path) -> str:
    """Return a file's MD5 after the tasks that write it, which all began before this one: waiting ends."""
    wait(tasks)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _shard(name: str, records: Sequence[Record], md5: str) -> dict[str, Any]:
    return {
        "dataPath": name,
        "format": "raw-shard",
        "nbytes": records[-1].offset + records[-1].nbytes,
        "records": [
            {
                "name": record.name,
                "shape": list(record.shape),
                "dtype": record.dtype,
                "format": LABEL,
                "nbytes": record.nbytes,
                "byteOffset": record.offset,
            }
            for record in records
        ],
        "md5sum": md5,
    }
