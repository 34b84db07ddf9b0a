"""Contents of a hub repository: an artifact's files, or all GGUF files of a model, and the files that describe them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from quantmill.checkpoint import shards
from quantmill.checkpoint.selection import INDEXES, is_artifacts
from quantmill.common import manifest, plain_file
from quantmill.common.atomic import MANIFEST
from quantmill.common.program import UserError
from quantmill.llamacpp import files as gguf_files
from quantmill.publish import licence, public

CARD, RESULTS, STUDY, PLOT = "README.md", "results.json", "study.yaml", "quality-speed.png"


@dataclass(frozen=True)
class Artifact:
    """Artifact of the study: folder, manifest, and files by their names in the repository.

    `left_out` names files that are not uploaded.
    """

    name: str
    folder: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, Path]
    left_out: Sequence[str] = ()


def read(model: str, folder: Path) -> Artifact:
    """Read an artifact from its folder. Raises `UserError` if a file is not the one that its manifest names."""
    found = manifest.read(folder)
    if (folder / gguf_files.MODEL).is_file():
        type_ = folder.name.removeprefix("gguf-")  # a GGUF file's usual name is MODEL-Q4_K_M.gguf
        names = {f"{model}-{type_ if type_ == folder.name else type_.upper()}.gguf": gguf_files.MODEL}
    else:
        indexed = plain_file.is_there(folder / INDEXES["safetensors"])
        weights = {file.name for file in shards.find(folder).files} if indexed else set()  # shards have any name
        taken = (name for name in found["files"] if name in weights or is_artifacts(name))
        names = {name: name for name in taken if name != CARD}
    for name in names.values():
        if not (folder / name).is_file() or (folder / name).stat().st_size != found["files"][name]["bytes"]:
            raise UserError(f"{folder / name}: is not what {manifest.NAME} beside it names; build the artifact again")
    manifest.read_unchanged(folder)
    files = {ours: folder / theirs for ours, theirs in names.items()}
    return Artifact(folder.name, folder, found, files, sorted(found["files"].keys() - {*names.values(), CARD}))


def hashes(artifacts: Sequence[Artifact], files: Mapping[str, Path | bytes]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file. An artifact's are those of its manifest: no large file is read twice."""
    known = {name: each.manifest["files"][path.name] for each in artifacts for name, path in each.files.items()}
    return {name: known.get(name) or entry(content) for name, content in sorted(files.items())}


def entry(content: Path | bytes) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    if isinstance(content, bytes):
        return {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    return {"bytes": content.stat().st_size, "sha256": manifest.sha256(content)}


def describe(
    model: str, layout: str, artifacts: Sequence[Artifact], files: Mapping[str, Mapping[str, Any]], shown: public.Public
) -> bytes:
    """Return the quantmill.json of a repository: how each artifact was made, and each file's size and SHA-256."""
    content = {
        "model": model,
        "layout": layout,
        "source": shown.value(public.source(artifacts[0].manifest["source"]), MANIFEST, "source"),
        "artifacts": {each.name: facts(each, shown) | {"files": list(each.files)} for each in artifacts},
        "files": dict(sorted(files.items())),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def facts(artifact: Artifact, shown: public.Public) -> dict[str, Any]:
    """Return the facts of a manifest about how an artifact was made, without private ones."""
    known = {*public.fields("artifact")}
    kept = {key: value for key, value in artifact.manifest.items() if key in known and key != "source"}
    return shown.value(kept, MANIFEST, artifact.name)


def beside(results: Mapping[str, Any], source: Path | None, plot: bytes) -> dict[str, Path | bytes]:
    """Return the files next to the artifacts, without the card: rows, study, plot and terms.

    Args:
        results: from `public.results`. plot: PNG of this model only, because the report's shows the other models too.
    """
    return {
        **(licence.texts(source) if source else {}),
        RESULTS: (json.dumps(results, allow_nan=False) + "\n").encode(),
        STUDY: yaml.safe_dump(results["config"], sort_keys=False, allow_unicode=True).encode(),
        PLOT: plot,
    }
