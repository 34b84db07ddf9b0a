"""Rows of `make plan`: what is left to make of a study's models, with its disk, memory and time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from quantmill.common.atomic import can_clone
from quantmill.plan import jobs
from quantmill.plan.cells import prebuilt_files
from quantmill.plan.jobs import Jobs, Resources
from quantmill.plan.model_facts import Origin
from quantmill.plan.model_source import source
from quantmill.plan.resources import MB
from quantmill.plan.texts import count_tokens
from quantmill.report.labels import label

ARTIFACTS = Path("artifacts")
TORCH = 8.0  # seconds until a process has torch and transformers
DOCUMENTS = 1000  # of a task without a limit: their number is known once they are fetched


@dataclass(frozen=True)
class Row:
    """A line of the table: bytes of disk, MB of memory, seconds of each job; None is unknown. `temporary`: bytes that a
    job needs until it ends. `gpu_mb`: MB of each GPU of its build, if that chooses by them."""

    model: str
    name: str
    disk: int | None
    mb: int | None
    seconds: tuple[float | None, ...]
    temporary: int = 0
    gpu_mb: int = 0


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def copy_bytes(place: Path, nbytes: int | None) -> int | None:
    """Return the bytes of disk that copying `nbytes` from a place takes: 0 if artifacts' file system has reflinks."""
    if not same_disk(place, ARTIFACTS):
        return nbytes
    try:
        return 0 if can_clone(nearest_folder(ARTIFACTS)) else nbytes
    except OSError:  # not writable, or full
        return nbytes


def same_disk(one: Path, other: Path) -> bool:
    return nearest_folder(one).stat().st_dev == nearest_folder(other).stat().st_dev


def prebuilt_bytes(words: Mapping[str, Any]) -> int | None:
    """Return the bytes that a prebuilt artifact takes here; None for one of the hub."""
    files = [file for file in prebuilt_files(words) if file.is_file()]
    return copy_bytes(Path(words["path"]), sum(file.stat().st_size for file in files)) if "path" in words else None


def weights_rows(name: str, model: dict[str, Any], found: Origin, left: set[str], costs: Jobs) -> list[Row]:
    """Return the rows of a model's source, its list of tensors, and its safetensors, which share a source's bytes if
    that has the same form. A source in low bits is written anew."""
    kind, path = source(model)
    place = Path(constants.HF_HUB_CACHE) if kind == "hub" else path
    disk = found.weight_bytes if kind == "random" or found.decoded else copy_bytes(place, found.weight_bytes)
    mb = {"random": jobs.RANDOM_WEIGHTS, "hub": jobs.DOWNLOADING}.get(kind, jobs.STREAMING)
    copy = costs.copy(found.shape).seconds if found.shape else None
    made = copy
    if found.decoded:
        mb = jobs.DECODING
        made = copy and copy + jobs.DECODE * (found.shape.parameters if found.shape else 0)
    written = 0 if found.form == "safetensors" else found.weight_bytes
    rows = [
        Row(name, "source", disk, jobs.job_mb(mb), (made,)),
        Row(name, "tensors.json", 0, jobs.job_mb(jobs.NAMING), (TORCH,)),
        Row(name, "safetensors", written, jobs.job_mb(jobs.STREAMING), (copy,)),
    ]
    return [row for row in rows if f"artifacts/{name}/{row.name}" in left]


def row_of(model: str, name: str, disk: int | None, planned: list[Resources], temporary: int = 0) -> Row:
    """Return the row of several jobs; its memory is that of the largest."""
    mb = max(each.mb for each in planned) if all(each.known for each in planned) else None
    gpu_mb = max(each.gpu_mb for each in planned)
    return Row(model, name, disk, mb, tuple(each.seconds for each in planned), temporary, gpu_mb)


def cell_row(cell: dict[str, Any], model: dict[str, Any], found: Origin, left: set[str], costs: Jobs) -> Row | None:
    """Return a row for a cell: its artifact, and the jobs that build and measure it; None if none is left."""
    name, format, engine = label(cell), cell["format"], cell["engine"]
    parts = ("artifact", "latency", "quality", "loads", "tasks")
    done = {"quality"} if name == costs.study["reference"] else set()  # with its predictions: `reference_rows`
    kinds = [kind for kind in parts if cell.get(kind) in left and kind not in done]
    if not kinds:
        return None
    if found.shape is None:
        return Row(cell["model"], name, None, None, (None,) * len(kinds))
    planned: list[Resources] = []
    size: int | None = 0
    temporary = 0
    if "artifact" in kinds:
        left.remove(cell["artifact"])  # other runs of it come after
        gated = source(model)[0] != "random"
        seen = count_tokens(ARTIFACTS / cell["model"], model, "calibration", left)
        planned.append(costs.build(format, engine, found.shape, gated, seen))
        prebuilt = model["prebuilt"].get(format)
        size = prebuilt_bytes(prebuilt) if prebuilt else costs.artifact_bytes(format, found.shape)
        temporary = max(0, (planned[0].disk_mb - jobs.SMALL) * MB - (size or 0)) if planned[0].known else 0
        size = 0 if format == "fp16" and found.dtype == "float16" else size
    if "latency" in kinds:
        prompts = Path(model["texts"]["prompts"]).read_text(encoding="utf-8").splitlines()
        planned.append(costs.latency(format, engine, found.shape, sum(bool(line.strip()) for line in prompts)))
    if "tasks" in kinds:
        tasks = costs.study["tasks"]
        documents = len(tasks["names"]) * tasks.get("limit", DOCUMENTS)
        planned.append(costs.tasks(format, engine, found.shape, documents))
    if "quality" in kinds:
        read = count_tokens(ARTIFACTS / cell["model"], model, "evaluation", left)
        planned.append(costs.score(format, engine, found.shape, read))
    if "loads" in kinds:
        planned.append(costs.load(format, engine, found.shape))
    return row_of(cell["model"], name, size, planned, temporary)


def reference_rows(name: str, model: dict[str, Any], found: Origin, left: set[str], costs: Jobs) -> list[Row]:
    """Return the rows of the gate's predictions, of the reference, and of what GGUF's types are chosen by."""
    folder = f"artifacts/{name}"
    files = {
        "gate": f"{folder}/expected.json",
        "predictions": f"{folder}/quality/{costs.study['reference']}-predictions",
        "noise-floor": f"{folder}/quality/noise-floor.json",
        "imatrix": f"{folder}/imatrix",
        "gguf-sensitivity": f"{folder}/gguf-sensitivity.json",
    }
    if found.shape is None:
        return [Row(name, each, None, None, (None,)) for each, file in files.items() if file in left]
    positions = count_tokens(ARTIFACTS / name, model, "evaluation", left)
    kept = None
    if positions is not None and found.shape.vocab:
        kept = jobs.reference_bytes(positions, found.shape, costs.study["device"], costs.study["reference_logits"])
    score = costs.score(*costs.reference, found.shape, positions)
    planned = {"gate": costs.expect(found.shape), "predictions": score, "noise-floor": score}
    planned |= {"imatrix": costs.imatrix(found.shape), "gguf-sensitivity": costs.sensitivity(found.shape)}
    return [
        row_of(name, each, kept if each == "predictions" else 0, [planned[each]])
        for each, file in files.items()
        if file in left
    ]


def study_rows(listed: dict[str, Any], costs: Jobs, origins: dict[str, Origin]) -> list[Row]:
    """Return the rows of all models."""
    left, rows = set(listed["left"]), []
    for name, model in listed["study"]["models"].items():
        rows += weights_rows(name, model, origins[name], left, costs)
        cells = [cell for cell in listed["cells"] if cell["model"] == name]
        rows += filter(None, (cell_row(cell, model, origins[name], left, costs) for cell in cells))
        rows += reference_rows(name, model, origins[name], left, costs)
    return rows


def peak(rows: Iterable[Row], origins: dict[str, Origin]) -> int:
    """Return the most bytes that artifacts/ grows by, with downloads if they are on the same disk.

    An artifact stays until its replacement is complete. Of temporary bytes, those of the largest job count.
    """
    grown, largest = 0, 0
    for row in rows:
        if row.disk is not None:
            old = (ARTIFACTS / row.model / row.name).exists()
            grown += 0 if old else row.disk
            largest = max(largest, row.temporary + (row.disk if old else 0))
    grown += largest
    if same_disk(Path(constants.HF_HUB_CACHE), ARTIFACTS):
        grown += sum(found.download for found in origins.values())
    return grown
