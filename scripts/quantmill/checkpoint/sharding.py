"""Write checkpoint folders: one file, or shards with an index."""

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from quantmill.checkpoint.selection import INDEXES, SINGLES
from quantmill.checkpoint.shards import Checkpoint, read_json
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.atomic import clone_or_copy
from quantmill.common.bounded_json import MAX_BYTES
from quantmill.devices.cpu import available_threads

Written = TypeVar("Written")
WORKERS = 4  # files written at the same time; more do not use a disk better

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def names(form: str, count: int) -> list[str]:
    """Return the names of `count` weight files of a form (`safetensors`, `bin`), as transformers names them."""
    single = Path(SINGLES[form])
    if count == 1:
        return [single.name]
    return [f"{single.stem}-{number:05d}-of-{count:05d}{single.suffix}" for number in range(1, count + 1)]


def split(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Return groups of at most `limit` bytes, in the tensors' order. A larger tensor gets a group of its own."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def group_by_file(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return groups of tensors that lie in one file, in the tensors' order."""
    groups: dict[Path, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.path, []).append(tensor)
    return list(groups.values())


def write(
    folder: Path, form: str, groups: Sequence[Sequence[Tensor]], write_file: Callable[[Path, Sequence[Tensor]], Written]
) -> dict[str, Written]:
    """Write each group to a file with `write_file(path, tensors)`, several at a time, and the index. Return what
    `write_file` returned for each file's name, in the groups' order."""
    files = dict(zip(names(form, len(groups)), groups, strict=True))
    with ThreadPoolExecutor(min(WORKERS, available_threads())) as workers:
        paths = [folder / name for name in files]
        results = dict(zip(files, workers.map(write_file, paths, files.values()), strict=True))
    if len(files) > 1:
        total = sum(tensor.nbytes for group in groups for tensor in group)
        (folder / INDEXES[form]).write_text(index_json(files, total), encoding="utf-8")
    return results


def index_json(files: Mapping[str, Sequence[Tensor]], total_size: int) -> str:
    """Return the text of an index. `files` maps a file's name to its tensors; total_size is the bytes of all of
    them."""
    weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    return (
        json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    )


def place_index(source: Checkpoint, tensors: Sequence[Tensor], folder: Path) -> None:
    """Put a checkpoint's index, if it has one, into a folder with the same files, or into its own. It is written anew
    if it lacks the metadata that transformers requires."""
    if (index := source.index()) is None:
        return
    metadata = read_json(index, MAX_BYTES).get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int | float):
        if folder != source.folder:
            clone_or_copy(index, folder / index.name)
        return
    files = {group[0].path.name: group for group in group_by_file(tensors)}
    total = sum(tensor.nbytes for tensor in tensors)
    (folder / index.name).unlink(missing_ok=True)
    (folder / index.name).write_text(index_json(files, total), encoding="utf-8")


def parse_size(text: str) -> int:
    """Return the bytes of `5GB`, `500 MB`, `2GiB` or `1000000`. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]?I?B?)", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if size == 0:
        raise ArgumentTypeError(f"{text!r} is not a size; write 5GB, 500MB or 2GiB")
    return size
