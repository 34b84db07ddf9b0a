"""quantmill.json: what an artifact is, what made it and from what, and what it costs to read."""

import hashlib
import json
import resource
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quantmill.common import bounded_json, plain_file
from quantmill.common.atomic import MANIFEST, fsync_path
from quantmill.common.plain_file import open_plain
from quantmill.common.program import UserError

NAME = MANIFEST
MAX_BYTES = 4 * 2**20
HASHERS = 4  # files hashed at the same time
_STARTED = time.monotonic()


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a plain file's bytes."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def peak_rss_bytes(children: bool = False) -> int:
    """Most resident memory that this program has held, in bytes; with `children`, or the largest of those that it has
    started and that have ended.

    Linux's own count of the program where there is one: getrusage's goes on from what the process that started it held.
    Elsewhere getrusage, which counts bytes on macOS and KiB on other systems.
    """
    if children:
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        return max(peak_rss_bytes(), largest if sys.platform == "darwin" else largest * 1024)
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="utf-8").splitlines() if status.exists() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write(
    folder: Path,
    *,
    format: str,
    engine: str | None = None,
    tool: str,
    tool_version: str,
    parameters: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
    parameter_count: int | None = None,
    weight_files: list[str] | None = None,
    unread_bytes: int = 0,
    weight_bytes_per_token: int | None = None,
    calibration_sha256: str | None = None,
    gate: Mapping[str, Any] | None = None,
    hashes: Mapping[str, str | None] | None = None,
    prebuilt: bool = False,
    experts: Mapping[str, Any] | None = None,
    peak_memory_bytes: int | None = None,
) -> None:
    """Write the manifest, as the last file of an artifact.

    Args:
        folder: the artifact, all its other files already in place.
        format: name of the format, e.g. `ct2-int8`.
        engine: name of the engine that runs it (a module of scripts/engines); none where nothing runs it as it is.
        tool: what built it; `tool_version`: its version, asked of the tool.
        parameters: everything that was passed to the tool.
        source: where the weights came from (`read(...)["source"]` of the artifact that this one was built from).
        parameter_count: number of weights of the model, whatever their dtype; of the language model where the format
            holds nothing else.
        weight_files: names of the files that hold weights.
        unread_bytes: of these files, what holds nothing that the model uses; it counts as no weights.
        weight_bytes_per_token: bytes of weights that one decoded token reads (the embedding table, of which it reads
            one row, left out), as stored.
        calibration_sha256: hash of the calibration text, where one was used.
        gate: what the quality gate found, where it was asked; its `seconds` do not count as building.
        hashes: SHA-256 of files that is known already, or None for a file that is not to be hashed.
        prebuilt: somebody else built it.
        experts: of a mixture that was calibrated, how many there are and which of them no text reached.
        peak_memory_bytes: of building, where that is not what this program held.
    """
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."}
    known = dict(hashes or {})
    with ThreadPoolExecutor(HASHERS) as workers, ThreadPoolExecutor(1) as disk:
        flushes = [disk.submit(fsync_path, path) for path in files.values()]  # publishing would wait for it afterwards
        missing = [name for name in files if name not in known]
        known |= zip(missing, workers.map(sha256, (files[name] for name in missing)), strict=True)
        for each in flushes:
            each.result()
    weight_bytes = sum(files[name].stat().st_size for name in weight_files or []) - unread_bytes
    content = {
        "format": format,
        "engine": engine,
        **({"prebuilt": True} if prebuilt else {}),
        "tool": tool,
        "tool_version": tool_version,
        "parameters": dict(parameters or {}),
        "source": dict(source or {}),
        "calibration_sha256": calibration_sha256,
        "gate": dict(gate) if gate else None,
        **({"experts": dict(experts)} if experts else {}),
        "parameter_count": parameter_count,
        "weight_bytes": weight_bytes,
        "bits_per_weight": weight_bytes * 8 / parameter_count if parameter_count else None,
        "weight_bytes_per_token": weight_bytes_per_token,
        "bytes": sum(path.stat().st_size for path in files.values()),
        "build_s": round(time.monotonic() - _STARTED - (gate or {}).get("seconds", 0), 3),
        "peak_memory_bytes": peak_memory_bytes or peak_rss_bytes(),
        "files": {name: {"bytes": path.stat().st_size, "sha256": known[name]} for name, path in files.items()},
    }
    with (folder / NAME).open("x", encoding="utf-8") as file:  # never through a link to somebody else's
        file.write(json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """The manifest of an artifact. Raises `UserError` where there is none, or it is none of ours."""
    path = folder / NAME
    if not plain_file.is_there(path):
        raise UserError(f"{path} is missing: {folder} is not a finished artifact; build it again")
    try:
        content = bounded_json.loads(plain_file.read(path, MAX_BYTES), MAX_BYTES)
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error!s:.80}); build the artifact again") from None
    if not isinstance(content, dict) or not isinstance(content.get("source"), dict):
        raise UserError(f"{path}: is no manifest of Quantmill's; remove it, or build the artifact again")
    return content


def read_checked(folder: Path, left_out: Collection[str] = ()) -> dict[str, Any]:
    """The manifest of an artifact that something is to be made of, after each of its files was held against it, but for
    those `left_out`, which the caller reads and gives to `check`. Raises `UserError` where `read` and `check` do."""
    content = read(folder)
    names = [name for name in recorded(folder, content) if name not in left_out]
    with ThreadPoolExecutor(HASHERS) as workers:
        check(folder, content, dict(zip(names, workers.map(_digest, (folder / name for name in names)), strict=True)))
    return content


def read_unchanged(folder: Path) -> dict[str, Any]:
    """The manifest of an artifact that is to be measured, after each file was held against it that has another size, or
    was written to after the manifest, which is written last: the others are not read for that. Raises `UserError` where
    `read` and `check` do."""
    content, then = read(folder), (folder / NAME).stat().st_mtime_ns
    suspects = []
    for name in recorded(folder, content):
        found = (folder / name).stat() if plain_file.is_there(folder / name) else None
        if found is None or found.st_size != content["files"][name].get("bytes") or found.st_mtime_ns > then:
            suspects.append(name)
    check(folder, content, {name: _digest(folder / name) for name in suspects})
    return content


def check(folder: Path, content: Mapping[str, Any], found: Mapping[str, str | None]) -> None:
    """Raises `UserError` where files of an artifact, by their names, have not the SHA-256 of its manifest any more.

    What was made of them would bear the name of another model.
    """
    for name, digest in recorded(folder, content).items():
        if name in found and found[name] != digest:
            what = "is not there any more" if found[name] is None else f"is not what {NAME} beside it names any more"
            raise UserError(f"{folder / name}: {what}; remove the folder {folder}, and it is made again")


def recorded(folder: Path, content: Mapping[str, Any]) -> dict[str, str]:
    """The files that a manifest has a SHA-256 of. Raises `UserError` where it names none as ours do."""
    entries = content.get("files", {})
    if not isinstance(entries, dict) or not all(
        name == Path(name).name and isinstance(entry, dict) for name, entry in entries.items()
    ):
        raise UserError(f"{folder / NAME}: names no files with their hashes; build the artifact again")
    return {name: entry["sha256"] for name, entry in entries.items() if entry.get("sha256")}


def _digest(path: Path) -> str | None:
    """The SHA-256 of a file; None where there is none."""
    return sha256(path) if plain_file.is_there(path) else None
