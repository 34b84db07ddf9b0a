"""Fetch a model, a text or a prebuilt artifact, from a folder or from the hub."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quantmill.checkpoint import selection, shards
from quantmill.common import manifest
from quantmill.common.atomic import clone_or_copy, write_atomically
from quantmill.common.program import UserError
from quantmill.layouts import published


def write_source(
    dst: Path, files: Mapping[str, Path], expected: Mapping[str, str | None], origin: dict[str, Any], **facts: Any
) -> None:
    """Copy the files of a checkpoint to a new folder, with `facts` and `origin` in its manifest. Weights in low bits
    are decoded (layouts.published). Raises `UserError` for a file without its expected SHA-256, for a copy that is not
    a whole checkpoint, and as `published.read` and `published.write` do."""
    place = min({path.parent for path in files.values()})
    with write_atomically(dst, source=place) as folder, ThreadPoolExecutor(manifest.HASHERS) as workers:
        folder.mkdir()
        before = {name: stat(path) for name, path in files.items()}
        low_bits = published.read(shards.find(place, files))
        weights = [name for name in files if name.endswith((".safetensors", ".bin"))]
        read = {*weights, *selection.INDEXES.values(), "config.json"} & {*files} if low_bits else set()
        copied = {name: path for name, path in files.items() if name not in read}
        digests = workers.map(clone_or_copy, copied.values(), (folder / name for name in copied))
        hashes = dict(zip(copied, digests, strict=True))
        known = hashes | dict(zip(read, workers.map(manifest.sha256, (files[name] for name in read)), strict=True))
        for name, digest in known.items():
            if expected.get(name) not in (None, digest):
                raise UserError(f"{files[name]}: has other bytes than the hub says; remove it from the hub's cache")
        source = origin | {"sha256": {name: known[name] for name in weights}}
        if low_bits:
            weights = published.write(low_bits, folder)
            source |= {"decoded": low_bits.facts}
        for name in read:
            if stat(files[name]) != before[name]:
                raise UserError(f"{files[name]}: was written to while it was read; run again when that is done")
        manifest.write(folder, format="source", source=source, weight_files=weights, hashes=hashes, **facts)
        shards.find(folder)


def stat(path: Path) -> tuple[int, int]:
    """Return a file's size and its time of modification in ns."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns
