"""Fetch a model, a text or a prebuilt artifact, from a folder or from the hub."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quantmill.checkpoint import shards
from quantmill.common import manifest
from quantmill.common.atomic import clone_or_copy, write_atomically
from quantmill.common.program import UserError


def write_source(
    dst: Path, files: Mapping[str, Path], expected: Mapping[str, str | None], origin: dict[str, Any], **facts: Any
) -> None:
    """Copy the files of a checkpoint to a new folder, with `facts` and `origin` in its manifest. Raises `UserError` for
    a file without its expected SHA-256, and for a copy that is not a whole checkpoint."""
    folders = {path.parent for path in files.values()}
    with write_atomically(dst, source=min(folders)) as folder, ThreadPoolExecutor(manifest.HASHERS) as workers:
        folder.mkdir()
        digests = workers.map(clone_or_copy, files.values(), (folder / name for name in files))
        hashes = dict(zip(files, digests, strict=True))
        for name, digest in hashes.items():
            if expected.get(name) not in (None, digest):
                raise UserError(f"{files[name]}: has other bytes than the hub says; remove it from the hub's cache")
        weights = [name for name in files if name.endswith((".safetensors", ".bin"))]
        source = origin | {"sha256": {name: hashes[name] for name in weights}}
        manifest.write(folder, format="source", source=source, weight_files=weights, hashes=hashes, **facts)
        shards.find(folder)
