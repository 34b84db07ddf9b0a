"""Take an artifact that others built: check that it is of this model, and record its origin.

    python scripts/quantmill fetch.prebuilt (PATH | ORGANISATION/NAME --revision COMMIT [--file FILE]) DST --model MODEL
        --layout gptq --format NAME --engine gptqmodel [--engine-python PYTHON]

MODEL is the folder of this model's safetensors. PATH is a folder or a .gguf file. Files are copied: reflinks if the
file system has them. Those of the hub come from one commit with checked hashes; hashes in a quantmill.json next to them
are checked as well. Only an index that lacks its metadata is changed, and no code of the artifact runs. The quality
gate then runs it like any other.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from quantmill.checkpoint import shards
from quantmill.checkpoint.tensor import refuse_pointer
from quantmill.common import manifest, plain_file
from quantmill.common.atomic import MANIFEST, clone_or_copy, write_atomically
from quantmill.common.program import UserError, parser
from quantmill.fetch import hub, prebuilt_layouts
from quantmill.gate import quality_gate

CARD = "README.md"


class Found(NamedTuple):
    """An artifact's files by their names in ours, the user's name of each, and its source for the manifest. names:
    by the same, the names in a quantmill.json of the folder `beside`, if there is one; `place` is that folder in
    errors."""

    files: dict[str, Path]
    origins: dict[str, str]
    source: dict[str, Any]
    names: dict[str, str]
    beside: Path | None
    place: str


def check_hashes(found: Found, digests: Mapping[str, str]) -> None:
    """Raise `UserError` if a quantmill.json next to an artifact names other hashes than its files have. A model card
    may have been edited since, and no engine reads it."""
    if not found.beside or not plain_file.is_there(found.beside / MANIFEST):
        return
    recorded = manifest.read(found.beside).get("files")
    if not isinstance(recorded, dict) or not all(isinstance(each, dict) for each in recorded.values()):
        raise UserError(f"{found.place}/{MANIFEST}: names no files with their hashes; remove it")
    for ours, name in found.names.items():
        if name in recorded and name != CARD and digests[ours] != recorded[name].get("sha256"):
            raise UserError(
                f"{found.place}/{name}: does not have the SHA-256 that {MANIFEST} next to it names; fetch it again"
            )


def of_path(path: Path, layout: ModuleType) -> Found:
    """Find a local artifact. Raises `UserError` if files are missing."""
    files = layout.local(path)
    folder = path if path.is_dir() else path.parent
    origins, names = ({name: kind(file) for name, file in files.items()} for kind in (str, attrgetter("name")))
    return Found(files, origins, {"kind": "path", "path": str(path), "commit": None}, names, folder, str(folder))


def of_hub(name: str, revision: str, layout: ModuleType, file: str | None) -> Found:
    """Find an artifact in a repository of the hub, at one commit."""
    repository = hub.resolve(name, revision)
    names = layout.remote(repository.name, repository.files, file)
    fetched = hub.fetch(repository, [*names.values(), *({MANIFEST} & repository.files.keys())])
    source = {"kind": "hub", "hub": repository.name, "revision": revision, "commit": repository.commit}
    files = {ours: fetched[theirs] for ours, theirs in names.items()}
    origins = {ours: f"{repository.name}/{theirs}" for ours, theirs in names.items()}
    beside = fetched[MANIFEST].parent if MANIFEST in fetched else None  # as publish/push.py uploads it
    return Found(files, origins, source | ({"file": file} if file else {}), names, beside, repository.name)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", help="a folder or a file, or with --revision a repository of the hub")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--revision", help="branch, tag or commit")
    arguments.add_argument("--file", help="the repository's file; of a split one any part")
    arguments.add_argument("--model", type=Path, required=True, help="folder of this model's safetensors")
    arguments.add_argument("--layout", required=True)
    arguments.add_argument("--format", required=True, help="its name in the study")
    arguments.add_argument("--engine", required=True, help="what runs it")
    arguments.add_argument("--engine-python", help="the interpreter that has the engine")
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda: where the quality gate runs it")
    quality_gate.add_arguments(arguments)
    options = arguments.parse_args()
    options.src = options.model

    layout = prebuilt_layouts.of(options.layout)
    if options.revision:
        found = of_hub(options.artifact, options.revision, layout, options.file)
    else:
        found = of_path(Path(options.artifact), layout)
    for path in found.files.values():
        refuse_pointer(path)
    with write_atomically(options.dst) as folder:
        folder.mkdir()
        with ThreadPoolExecutor(manifest.HASHERS) as workers:
            digests = workers.map(clone_or_copy, found.files.values(), (folder / name for name in found.files))
            placed = dict(zip(found.files, digests, strict=True))
        check_hashes(found, placed)
        for path in layout.beside(options.model) if hasattr(layout, "beside") else ():
            clone_or_copy(path, folder / path.name)
        try:
            facts = layout.check(folder, options.model, options.layout)
        except UserError as error:  # name the origin: this folder is gone when the line is read
            said = str(error)
            for name, origin in found.origins.items():
                said = said.replace(str(folder / name), origin)
            raise UserError(said.replace(str(folder), options.artifact)) from None
        whole = manifest.read_checked(options.model)["parameter_count"]
        weights = whole if prebuilt_layouts.is_packed(options.layout) else shards.text_parameters(options.model)
        known = layout.gate_layout(folder) if hasattr(layout, "gate_layout") else options.layout
        gate = quality_gate.check(folder, known, options)
        unread = facts.pop("unread", {})
        hashes = {name: placed[name] for name in facts["weight_files"]}
        manifest.write(
            folder,
            format=options.format,
            engine=options.engine,
            tool=facts.pop("tool", "unknown"),
            tool_version="unknown",
            source=found.source | {"sha256": hashes} | ({"unread": [*unread]} if unread else {}),
            parameter_count=weights,
            unread_bytes=sum(unread.values()),
            gate=gate,
            hashes=hashes,
            prebuilt=True,
            **facts,
        )
