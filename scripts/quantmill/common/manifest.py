"""quantmill.json, an artifact's manifest: its format, tool, source, sizes and the hashes of its files."""

import hashlib
import json
import resource
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
HASHERS = 4  # files that are hashed at the same time
_STARTED = time.monotonic()


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a plain file."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def peak_rss_bytes(children: bool = False) -> int:
    """Return this program's peak resident memory in bytes; with `children`, at least that of its largest ended child.

    It is VmHWM if the kernel reports it, because getrusage's count starts from the memory of the parent process.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    own = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    own = own or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss if children else 0
    return max(own, largest) * 1024


def write(
    folder: Path,
    *,
    format: str,
    engine: str | None = None,
    tool: str,
    tool_version: str,
    written: str | None = None,
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
    placement: Mapping[str, Any] | None = None,
    peak_memory_bytes: int | None = None,
) -> None:
    """Write the manifest, as the last file of an artifact.

    Args:
        folder: the artifact, all its other files already in place.
        format: name of the format, e.g. `ct2-int8`.
        engine: name of the default engine (a module of quantmill.engines); None if no engine runs it as it is.
        tool: the program that built it. `tool_version`: as the tool reports it.
        written: how its files were written, if not by the tool itself.
        parameters: all parameters that were passed to the tool.
        source: the origin of the weights (`read(...)["source"]` of the artifact that this one was built from).
        parameter_count: number of weights of the model, or of the language model if the format holds nothing else.
        weight_files: names of the files that hold weights.
        unread_bytes: bytes of these files that the model does not use; they do not count as weights.
        weight_bytes_per_token: stored bytes of weights that decoding one token reads, without the embedding table, of
            which it reads one row.
        calibration_sha256: hash of the calibration text.
        gate: result of the quality gate; its `seconds` do not count as build time.
        hashes: known SHA-256 of files, or None for a file that is not to be hashed.
        prebuilt: the artifact was not built by Quantmill.
        experts: for a calibrated mixture, the calibration tokens that its routers sent to each expert
            (`build.quantizer.experts.facts`), or why that is unknown.
        placement: of a build on GPUs, what the tool kept on them, and the memory that it took.
        peak_memory_bytes: peak of the build, if that is not this program's peak.
    """
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."}
    known = dict(hashes or {})
    with ThreadPoolExecutor(HASHERS) as workers, ThreadPoolExecutor(1) as disk:
        flushes = [
            disk.submit(fsync_path, path) for path in files.values()
        ]  # `write_atomically` would wait for it afterwards
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
        **({"written": written} if written else {}),
        "parameters": dict(parameters or {}),
        "source": dict(source or {}),
        "calibration_sha256": calibration_sha256,
        "gate": dict(gate) if gate else None,
        **({"experts": dict(experts)} if experts else {}),
        **({"placement": dict(placement)} if placement else {}),
        "parameter_count": parameter_count,
        "weight_bytes": weight_bytes,
        "bits_per_weight": weight_bytes * 8 / parameter_count if parameter_count else None,
        "weight_bytes_per_token": weight_bytes_per_token,
        "bytes": sum(path.stat().st_size for path in files.values()),
        "build_s": round(time.monotonic() - _STARTED - (gate or {}).get("seconds", 0), 3),
        "peak_memory_bytes": peak_memory_bytes or peak_rss_bytes(),
        "files": {name: {"bytes": path.stat().st_size, "sha256": known[name]} for name, path in files.items()},
    }
    with (folder / NAME).open("x", encoding="utf-8") as file:  # never through a link to another file
        file.write(json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """Read an artifact's manifest. Raises `UserError` if it is missing or not Quantmill's."""
    path = folder / NAME
    if not plain_file.is_there(path):
        raise UserError(f"{path} is missing: {folder} is not a finished artifact; build it again")
    try:
        content = bounded_json.loads(plain_file.read(path, MAX_BYTES), MAX_BYTES)
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error!s:.80}); build the artifact again") from None
    if not isinstance(content, dict) or not isinstance(content.get("source"), dict):
        raise UserError(f"{path}: is not a manifest of Quantmill; remove it, or build the artifact again")
    return content


def read_checked(folder: Path, left_out: Collection[str] = ()) -> dict[str, Any]:
    """Read an artifact's manifest before building from it, and check the hash of each file.

    The caller reads the files in `left_out` and gives their hashes to `check`. Raises `UserError` as `read` and
    `check` do.
    """
    content = read(folder)
    names = [name for name in recorded(folder, content) if name not in left_out]
    with ThreadPoolExecutor(HASHERS) as workers:
        check(folder, content, dict(zip(names, workers.map(_digest, (folder / name for name in names)), strict=True)))
    return content


def read_unchanged(folder: Path) -> dict[str, Any]:
    """Read an artifact's manifest before measuring it, and check the hashes of suspect files.

    A file is suspect if its size differs or if it is newer than the manifest, which is written last. Other files are
    not read. Raises `UserError` as `read` and `check` do.
    """
    content, then = read(folder), (folder / NAME).stat().st_mtime_ns
    suspects = []
    for name in recorded(folder, content):
        found = (folder / name).stat() if plain_file.is_there(folder / name) else None
        if found is None or found.st_size != content["files"][name].get("bytes") or found.st_mtime_ns > then:
            suspects.append(name)
    check(folder, content, {name: _digest(folder / name) for name in suspects})
    return content


def check(folder: Path, content: Mapping[str, Any], found: Mapping[str, str | None]) -> None:
    """Compare hashes of an artifact's files, by name, with its manifest. Raises `UserError` for a difference.

    Whatever is made of a changed file would bear the name of another model.
    """
    for name, digest in recorded(folder, content).items():
        if name in found and found[name] != digest:
            what = "is missing" if found[name] is None else f"has changed since {NAME} was written"
            raise UserError(f"{folder / name}: {what}; remove the folder {folder}, and run again")


def recorded(folder: Path, content: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each file of a manifest. Raises `UserError` if its list of files is malformed."""
    entries = content.get("files", {})
    if not isinstance(entries, dict) or not all(
        name == Path(name).name and isinstance(entry, dict) for name, entry in entries.items()
    ):
        raise UserError(f"{folder / NAME}: its list of files is malformed; build the artifact again")
    return {name: entry["sha256"] for name, entry in entries.items() if entry.get("sha256")}


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file, or None if there is none."""
    return sha256(path) if plain_file.is_there(path) else None
