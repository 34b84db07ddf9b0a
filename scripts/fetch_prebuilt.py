#!/usr/bin/env python3
"""Take somebody else's artifact of a model: check that it is this model's, and record where it came from.

    python scripts/fetch_prebuilt.py (PATH | ORGANISATION/NAME --revision COMMIT [--file FILE]) DST --model MODEL
        --layout gptq --format NAME --engine gptqmodel [--engine-python PYTHON]

MODEL is the folder of this model's safetensors. Layouts are those of `LAYOUTS`; PATH is a folder or a .gguf file.
Local files are linked, those of the hub fetched at one commit, with their hashes checked; those that a quantmill.json
beside them names are checked as well. Nothing of it is changed but an index that lacks its metadata, and no code of it
is run. The quality gate then runs it like any other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint import shards
from common import hub, manifest
from common.program import UserError, parser, run
from common.publish import MANIFEST, place, publish
from prebuilt import PACKED, ct2, gguf, packed
from scoring import quality_gate

CARD = "README.md"
LAYOUTS = {"ct2": ct2, "gguf": gguf} | dict.fromkeys(PACKED, packed)


class Found(NamedTuple):
    """An artifact's files by their names in ours, what the user calls each, and its source for the manifest."""

    files: dict[str, Path]
    origins: dict[str, str]
    source: dict[str, Any]


def check_hashes(folder: Path, files: Mapping[str, Path], place: str) -> None:
    """Raises `UserError` where a quantmill.json that lies beside an artifact names other hashes than its files have.

    A model card may have been edited since, and no engine reads it.

    Args:
        files: by the names that the manifest has for them. place: what errors call the folder.
    """
    if not (folder / MANIFEST).is_file():
        return
    recorded = manifest.read(folder).get("files")
    if not isinstance(recorded, dict) or not all(isinstance(each, dict) for each in recorded.values()):
        raise UserError(f"{place}/{MANIFEST}: names no files with their hashes; remove it")
    for name, file in files.items():
        if name in recorded and name != CARD and manifest.sha256(file) != recorded[name].get("sha256"):
            raise UserError(f"{place}/{name}: has not the SHA-256 that {MANIFEST} beside it names; fetch it again")


def of_path(path: Path, layout: str) -> Found:
    """A local artifact. Raises `UserError` where files are missing or hashes differ."""
    files = LAYOUTS[layout].local(path)
    folder = path if path.is_dir() else path.parent
    check_hashes(folder, {file.name: file for file in files.values()}, str(folder))
    origins = {name: str(file) for name, file in files.items()}
    return Found(files, origins, {"kind": "path", "path": str(path), "commit": None})


def of_hub(name: str, revision: str, layout: str, file: str | None) -> Found:
    """The same of a repository of the hub, at one commit."""
    repository = hub.resolve(name, revision)
    names = LAYOUTS[layout].remote(repository.name, repository.files, file)
    fetched = hub.fetch(repository, [*names.values(), *({MANIFEST} & repository.files.keys())])
    if MANIFEST in fetched:  # as scripts/push.py leaves it beside what it uploads
        check_hashes(fetched[MANIFEST].parent, {name: fetched[name] for name in names.values()}, repository.name)
    source = {"kind": "hub", "hub": repository.name, "revision": revision, "commit": repository.commit}
    files = {ours: fetched[theirs] for ours, theirs in names.items()}
    origins = {ours: f"{repository.name}/{theirs}" for ours, theirs in names.items()}
    return Found(files, origins, source | ({"file": file} if file else {}))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", help="a folder or a file, or with --revision a repository of the hub")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--revision", help="branch, tag or commit")
    arguments.add_argument("--file", help="the repository's file; of a split one any part")
    arguments.add_argument("--model", type=Path, required=True, help="folder of this model's safetensors")
    arguments.add_argument("--layout", choices=LAYOUTS, required=True)
    arguments.add_argument("--format", required=True, help="its name in the study")
    arguments.add_argument("--engine", required=True, help="what runs it")
    arguments.add_argument("--engine-python", help="the interpreter that has the engine")
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda: where the quality gate runs it")
    quality_gate.add_arguments(arguments)
    options = arguments.parse_args()
    options.src = options.model

    layout = LAYOUTS[options.layout]
    if options.revision:
        found = of_hub(options.artifact, options.revision, options.layout, options.file)
    else:
        found = of_path(Path(options.artifact), options.layout)
    for path in found.files.values():
        shards.refuse_pointer(path)
    with publish(options.dst) as folder:
        folder.mkdir()
        for name, path in [*found.files.items(), *((path.name, path) for path in layout.beside(options.model))]:
            place(path, folder / name)
        try:
            facts = layout.check(folder, options.model, options.layout)
        except UserError as error:  # where it came from: this folder is gone when the line is read
            said = str(error)
            for name, origin in found.origins.items():
                said = said.replace(str(folder / name), origin)
            raise UserError(said.replace(str(folder), options.artifact)) from None
        whole = manifest.read(options.model)["parameter_count"]
        weights = whole if options.layout in PACKED else shards.text_parameters(options.model)
        gate_layout = layout.gate_layout(folder, options.layout)
        gate = quality_gate.check(folder, options.engine, gate_layout, options.device, options, options.engine_python)
        hashes = {name: manifest.sha256(folder / name) for name in facts["weight_files"]}
        manifest.write(
            folder,
            format=options.format,
            engine=options.engine,
            tool=facts.pop("tool", "unknown"),
            tool_version="unknown",
            source=found.source | {"sha256": hashes},
            parameter_count=weights,
            gate=gate,
            hashes=hashes,
            prebuilt=True,
            **facts,
        )


if __name__ == "__main__":
    run(main)
