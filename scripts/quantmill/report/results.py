"""Make rows, one for each model, format and run, of an artifact's manifest, its latency and its quality.

A cell that was not measured is None, and `missing` says why; it is never filled with a guess.
"""

import csv
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quantmill.common import manifest
from quantmill.common.program import UserError
from quantmill.metrics import METRICS_VERSION
from quantmill.report import bandwidth, caveats, deployed, memory, repetition
from quantmill.report.column import Column
from quantmill.report.columns import COLUMNS, figures
from quantmill.report.labels import key
from quantmill.report.pareto import mark_pareto, relate
from quantmill.report.rows import Cell, Results, Row, Study, value_of

SCHEMA_VERSION = 4
PARTS = ("artifact", "latency", "quality", "noise_floor")
DEFAULTS: dict[str, Any] = {"options": {}, "gpus": 1}  # of a run that names none
# set later, when all rows are there
UNSET: dict[str, Any] = {"dominated_by": None, "warnings": [], "device_bandwidth": None, "perplexity_ratio": None}
TOTALS = ("total_nll", "scored_tokens", "tokens", "words", "bytes")
RAW = ("runs", "output_ids", "deterministic")  # single runs and tokens, of a longer prompt or a batch
PENDING = "still to come: the study is running"
# how reasons begin and end that another run can take away
FAILED, AGAIN = "failed", "; run again"
OUTDATED = f"is older than the last edit{AGAIN}"
EXCEPTION = re.compile(r"[\w.]+(Error|Exception)\b")  # the last line of a traceback


def read_result(path: Path, kind: str) -> dict[str, Any]:
    """Read a result file. Raises `UserError` if it is damaged, or of another version of the metrics."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error!s:.80}); delete it and measure again") from None
    if result["kind"] != kind or result["metrics_version"] != METRICS_VERSION:
        raise UserError(
            f"{path}: is a {result['kind']} result of metrics version {result['metrics_version']}, "
            f"not a {kind} result of version {METRICS_VERSION}; delete it and measure again"
        )
    return result


def last_error(logs: Sequence[str]) -> str | None:
    """Return the error of the first of a job's logs, upstream first, that ends with one, ours or a library's."""
    for log in logs:
        lines = Path(log).read_text(encoding="utf-8", errors="replace").split("\n") if Path(log).exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if last.startswith("error: ") or EXCEPTION.match(last):
            return f"{FAILED}: {last.removeprefix('error: ')}"
    return None


def failure(logs: Sequence[str]) -> str:
    """Return why a job left nothing."""
    return last_error(logs) or f"{FAILED}, or never ran: see {logs[-1]}"


def absence(cell: Cell, name: str) -> str | None:
    """Return why a job's output is missing or stale, or None. Output older than an edit is ignored until the job ran
    again: no other file may show that it is old."""
    path = Path(value_of(cell, name))
    if name in cell.get("pending", ()):
        return PENDING
    if not (path / manifest.NAME if name == "artifact" else path).exists():
        return failure(cell["logs"][name])
    return (last_error(cell["logs"][name]) or OUTDATED) if name in cell.get("outdated", ()) else None


def mismatch(cell: Cell, config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Return why a result is not of the present artifact, the cell's run and the study's protocol; None if it is. After
    an edit, older results lie there until their jobs have run again."""
    path = Path(cell["artifact"])
    if not (path / manifest.NAME).exists():
        return failure(cell["logs"]["artifact"])
    if result["artifact"]["files"] != manifest.read(path)["files"]:
        return f"was measured of another build{AGAIN}"
    other = other_protocol(cell, config, result)
    other += [name for name, value in DEFAULTS.items() if result.get(name, value) != cell.get(name, value)]
    other += ["engine"] if result.get("engine", cell["engine"]) != cell["engine"] else []
    return f"was measured with another {', '.join(other)}{AGAIN}" if other else None


def other_protocol(cell: Cell, config: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return what differs between a result's protocol and the study's: keys of the config, and texts cut anew."""
    asked = {
        **config.get("latency", {}),
        **{name: config.get(name) for name in ("perplexity", "loads", "tasks", "seed")},
    }
    protocol = result.get("protocol", {})  # a noise floor that no engine gives has none
    other = [name for name, value in protocol.items() if asked.get(name, value) != value]
    for name, text in (("text_sha256", "evaluation"), ("prompts_sha256", "prompts")):
        path = Path(str(cell.get(text) or ""))
        if name in protocol and path.is_file() and of_tokens(path, path.stat().st_mtime_ns)[0] != protocol[name]:
            other.append(f"{text} text")
    return other


@cache
def of_tokens(tokens: Path, changed: int) -> tuple[str | None, str | None]:
    """Return the SHA-256 of the text that a file of tokens was cut from, and in words how others read it differently.

    `changed`: the file's time, so that each version is read once.
    """
    content = json.loads(tokens.read_text(encoding="utf-8"))
    return content.get("text_sha256"), content.get("tokenizer_differs")


def other_tokens(cell: Cell) -> str | None:
    """Return in words how others read one of the model's texts differently; None if all make the same tokens of it."""
    folder = Path(cell.get("evaluation") or "").parent
    paths = (folder / f"{text}.json" for text in ("evaluation", "prompts", "calibration", "burst"))
    return next(
        (said for path in paths if path.is_file() and (said := of_tokens(path, path.stat().st_mtime_ns)[1])), None
    )


def read_part(cell: Cell, config: Mapping[str, Any], name: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return what one job of a cell left, or None and why there is nothing."""
    if value_of(cell, name) is None:
        return None, cell["absent"].get(name)
    if why := absence(cell, name):
        return None, why
    path = Path(value_of(cell, name))
    if name == "artifact":
        return manifest.read(path), None
    found = read_result(path, name.replace("_", " "))
    if name == "noise_floor":
        other = other_protocol(cell, config, found)
        why = f"was measured with another {', '.join(other)}{AGAIN}" if other else None
    else:
        why = mismatch(cell, config, found)
    if not why and not found["summary"]:
        why = found["reason"]
    return (None, why) if why else (found, None)


def hash_files(artifact: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with one hash in place of its files': the SHA-256 of `sha256sum`'s lines, by name."""
    lines = [f"{file['sha256']}  {name}\n" for name, file in sorted(artifact["files"].items())]
    kept = {name: value for name, value in artifact.items() if name != "files"}
    return kept | {"files_sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}


def make_row(cell: Cell, config: Mapping[str, Any]) -> Row:
    """Make a row of the report, with what the page and comparisons need beyond the columns of results.csv.

    A part that failed leaves its columns empty, and `missing` quotes its log.
    """
    parts = {name: read_part(cell, config, name) for name in PARTS}
    found: dict[str, Any] = {"cell": cell} | {name: content for name, (content, _) in parts.items()}
    lacks = {name: why for name, (_, why) in parts.items() if why}
    if "artifact" in lacks:
        lacks |= {name: lacks["artifact"] for name in ("latency", "quality") if name in lacks}
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for column in COLUMNS:
        lost = next((lacks[part] for part in column.parts if part in lacks), None)
        values[column.name] = None if lost else column.value(found)
        if values[column.name] is None and (why := lost or column.why_missing):
            missing[column.name] = why
    artifact, speed, loss, noise = (found[name] for name in PARTS)
    made: Any = {
        **values,
        **UNSET,
        **{name: cell.get(name, value) for name, value in (DEFAULTS | {"prebuilt": False}).items()},
        "degenerate": speed and repetition.of_result(speed),
        "missing": missing,
        **speed_details(speed),
        **quality_details(loss),
        "protocol": {name: each and each["protocol"] for name, each in (("latency", speed), ("quality", loss))},
        "noise_floor": noise and {name: noise[name] for name in ("summary", "compute_type")},
        "artifact": artifact and hash_files(artifact),
    }
    if asked := config.get("memory_at"):
        made["memory_at"] = memory.count(asked, speed, lacks.get("latency"))
    return made


def speed_details(speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a row keeps of its latency beyond the columns; None of each if it was not measured."""
    names = ("compute_type", "mode", "deterministic", "versions", "conditions", "copy_bandwidth_bytes_per_second")
    if speed is None:
        others = ("differs", "threads", "other_modes", "latency_summary", "lengths", "batches", "device_details")
        return dict.fromkeys((*names, *others))
    return {
        **{name: speed[name] for name in names},
        "differs": speed.get("differs"),
        "threads": speed["device"].get("threads"),  # of the CPU; a GPU has none to choose
        "other_modes": [
            {"mode": way["mode"], "refused": way["refused"], "differs": way.get("differs")}
            | {name: way.get("summary", {}).get(name) for name in figures("latency")}
            for way in speed["other_modes"]
        ],
        "latency_summary": speed["summary"],
        **{
            part: [{name: value for name, value in each.items() if name not in RAW} for each in speed[part]]
            for part in ("lengths", "batches")
        },
        "device_details": speed["device"],
    }


def quality_details(loss: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a row keeps of its quality beyond the columns; None of each if it was not measured."""
    return {
        "quality_summary": loss and loss["summary"],
        "quality_windows": loss and loss["windows"],
        "quality_totals": loss and {name: loss[name] for name in TOTALS},
        "headline": loss and loss["headline"],
        "normalised": loss and loss["normalised"],
    }


def mark_noise(rows: Sequence[Row], reference: str) -> None:
    """Set `above_noise_floor` of rows whose engine gives only a lower bound of the divergence: whether it is above that
    of the reference's own weights in the same engine without options. That row is the floor, and not above it."""
    told = [
        (each, bound) for each in rows if each["kld_mean"] is None and (bound := each["kld_lower_bound"]) is not None
    ]
    floors = {
        (each["model"], each["engine"]): bound
        for each, bound in told
        if each["format"] == reference and not each["options"]
    }
    for each, bound in told:
        floor = floors.get((each["model"], each["engine"]))
        if floor is not None:
            each["above_noise_floor"] = bound > floor
            each["missing"].pop("above_noise_floor", None)


def collect(study: Study) -> Results:
    """Make results.json: the rows, the config that they come from, and the versions of this file and of the metrics."""
    config = study["config"]
    rows = [make_row(cell, config) for cell in study["cells"]]
    reference = config["reference"]
    bandwidth.share(rows)
    mark_noise(rows, reference)
    deployed.mark(rows, config.get("rank_own_speeds", False))
    mark_pareto(rows)
    by_key = {key(each): each for each in rows}
    for each, one in zip(rows, study["cells"], strict=True):
        relate(each, by_key.get((each["model"], reference, None)))
        each["warnings"] = caveats.all_of(each, reference, other_tokens(one))
    return {
        "schema_version": SCHEMA_VERSION,
        "metrics_version": METRICS_VERSION,
        "units": {column.name: column.unit for column in COLUMNS if column.unit},
        "config": config,
        "rows": rows,
    }


def failures(row: Mapping[str, Any]) -> list[str]:
    """Return why parts of a row are missing that the study asked for."""
    return list(dict.fromkeys(why for why in row["missing"].values() if why.startswith(FAILED) or why.endswith(AGAIN)))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column] = COLUMNS) -> None:
    """Write a table; what was not measured is an empty cell, an empty list `none`."""
    lists = [column.name for column in columns if column.kind == "array"]
    with path.open("w", newline="", encoding="utf-8") as file:
        names = [column.name for column in columns]
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for each in rows:
            words = {name: "none" if each[name] == [] else each[name] and "; ".join(each[name]) for name in lists}
            writer.writerow({**each, **words})
