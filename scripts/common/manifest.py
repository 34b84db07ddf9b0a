"""quantmill.json: what an artifact is, what made it and from what, and what it costs to read."""

import hashlib
import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.program import UserError
from common.publish import MANIFEST

NAME = MANIFEST
_STARTED = time.monotonic()


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def peak_rss_bytes() -> int:
    """Most resident memory that this program has held, in bytes.

    Linux's own count of the program where there is one: getrusage's goes on from what the process that started it held.
    Elsewhere getrusage, which counts bytes on macOS and KiB on other systems.
    """
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
    weight_bytes_per_token: int | None = None,
    calibration_sha256: str | None = None,
    gate: Mapping[str, Any] | None = None,
    hashes: Mapping[str, str | None] | None = None,
) -> None:
    """Write the manifest, as the last file of an artifact.

    Args:
        folder: the artifact, all its other files already in place.
        format: name of the format, e.g. `ct2-int8`.
        engine: name of the engine that runs it (a module of scripts/engines); none where nothing runs it as it is.
        tool: what built it; `tool_version`: its version, asked of the tool.
        parameters: everything that was passed to the tool.
        source: where the weights came from (`read(...)["source"]` of the artifact that this one was built from).
        parameter_count: number of weights of the model, whatever their dtype.
        weight_files: names of the files that hold weights.
        weight_bytes_per_token: bytes of weights that one decoded token reads (the embedding table, of which it reads
            one row, left out), as stored.
        calibration_sha256: hash of the calibration text, where one was used.
        gate: what the quality gate found, where it was asked.
        hashes: SHA-256 of files that is known already, or None for a file that is not to be hashed.
    """
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."}
    hashes = {name: hashes[name] if hashes and name in hashes else sha256(path) for name, path in files.items()}
    weight_bytes = sum(files[name].stat().st_size for name in weight_files or [])
    content = {
        "format": format,
        "engine": engine,
        "tool": tool,
        "tool_version": tool_version,
        "parameters": dict(parameters or {}),
        "source": dict(source or {}),
        "calibration_sha256": calibration_sha256,
        "gate": dict(gate) if gate else None,
        "parameter_count": parameter_count,
        "weight_bytes": weight_bytes,
        "bits_per_weight": weight_bytes * 8 / parameter_count if parameter_count else None,
        "weight_bytes_per_token": weight_bytes_per_token,
        "bytes": sum(path.stat().st_size for path in files.values()),
        "build_seconds": round(time.monotonic() - _STARTED, 3),
        "peak_memory_bytes": peak_rss_bytes(),
        "files": {name: {"bytes": path.stat().st_size, "sha256": hashes[name]} for name, path in files.items()},
    }
    (folder / NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def linked_hashes(folder: Path, origin: Path) -> dict[str, str | None]:
    """SHA-256 of the files in `folder` that are the very files of the artifact `origin`, from its manifest."""
    known = read(origin)["files"] if (origin / NAME).exists() else {}
    return {
        name: entry["sha256"]
        for name, entry in known.items()
        if (folder / name).exists() and (origin / name).exists() and (folder / name).samefile(origin / name)
    }


def read(folder: Path) -> dict[str, Any]:
    """The manifest of an artifact. Raises `UserError` where there is none."""
    path = folder / NAME
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {folder} is not a finished artifact; build it again") from None
