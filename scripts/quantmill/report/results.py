"""Rows: one a model, format and run, made of an artifact's manifest, its latency and its quality.

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
from quantmill.report import bandwidth, caveats, repetition
from quantmill.report.column import Column
from quantmill.report.columns import COLUMNS, figures
from quantmill.report.labels import key
from quantmill.report.pareto import mark_pareto, relate

SCHEMA_VERSION = 4
# what rows lack that were written up to a schema version, and why its columns are empty
ADDED: dict[int, dict[str, Any]] = {
    1: {"group_size": None, "dominated_by": None, "degenerate": None, "warnings": [], "device_bandwidth": None},
    2: {"run": None, "options": {}, "gpus": 1, "prebuilt": False},
}
REASONS = {"group_size": "not recorded by schema version 1", "run": "the format's default run"}
# the same of rows of servers under load, up to schema version 3
LOADS_ADDED = dict.fromkeys(("bandwidth_fraction", "decode_bound_by"), "not recorded by schema version 3")
RENAMED = {"mlc": "quantmill-tvm"}  # engines, since schema version 2

PARTS = ("artifact", "latency", "quality", "noise_floor")
DEFAULTS: dict[str, Any] = {"options": {}, "gpus": 1}  # of a run that names none
TOTALS = ("total_nll", "scored_tokens", "tokens", "words", "bytes")
PENDING = "still to come: the study is running"
# how reasons begin and end that another run can take away
FAILED, AGAIN = "failed", "; run again"
OUTDATED = f"is of before the last edit{AGAIN}"
EXCEPTION = re.compile(r"[\w.]+(Error|Exception)\b")  # the last line of a traceback


def read(path: Path, kind: str) -> dict[str, Any]:
    """A result file. Raises `UserError` where it is damaged, or another version of the metrics made it."""
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
    """The error of the first of a job's logs that ends with one, ours or a library's, upstream first; None where none
    does."""
    for log in logs:
        lines = Path(log).read_text(encoding="utf-8", errors="replace").split("\n") if Path(log).exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if last.startswith("error: ") or EXCEPTION.match(last):
            return f"{FAILED}: {last.removeprefix('error: ')}"
    return None


def failure(logs: Sequence[str]) -> str:
    """Why a job left nothing."""
    return last_error(logs) or f"{FAILED}, or never ran: see {logs[-1]}"


def absence(cell: Mapping[str, Any], name: str) -> str | None:
    """Why a cell has not what one of its jobs leaves; None where it has. What lies there of before an edit counts for
    nothing until the job has run again: no other file may tell that it is old."""
    path = Path(cell[name])
    if name in cell.get("pending", ()):
        return PENDING
    if not (path / manifest.NAME if name == "artifact" else path).exists():
        return failure(cell["logs"][name])
    return (last_error(cell["logs"][name]) or OUTDATED) if name in cell.get("outdated", ()) else None


def mismatch(cell: Mapping[str, Any], config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Why a latency or quality result is not of the artifact that is there, of the cell's run and of the study's
    protocol; None where it is. After an edit, what was measured before lies there until its job has run again."""
    path = Path(cell["artifact"])
    if not (path / manifest.NAME).exists():
        return failure(cell["logs"]["artifact"])
    if result["artifact"]["files"] != manifest.read(path)["files"]:
        return f"was measured of another build{AGAIN}"
    other = other_protocol(cell, config, result)
    other += [name for name, value in DEFAULTS.items() if result.get(name, value) != cell.get(name, value)]
    engine = result.get("engine", cell["engine"])
    other += ["engine"] if RENAMED.get(engine, engine) != RENAMED.get(cell["engine"], cell["engine"]) else []
    return f"was measured with another {', '.join(other)}{AGAIN}" if other else None


def other_protocol(cell: Mapping[str, Any], config: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """What of a result's protocol is not the study's: names of the config's keys, and of texts that were cut anew."""
    asked = {
        **config.get("latency", {}),
        **{name: config.get(name) for name in ("perplexity", "loads", "tasks", "seed")},
    }
    protocol = result.get("protocol", {})  # a noise floor that no engine gives has none
    other = [name for name, value in protocol.items() if asked.get(name, value) != value]
    for name, text in (("text_sha256", "evaluation"), ("prompts_sha256", "prompts")):
        path = Path(cell.get(text) or "")
        if name in protocol and path.is_file() and of_tokens(path, path.stat().st_mtime_ns)[0] != protocol[name]:
            other.append(f"{text} text")
    return other


@cache
def of_tokens(tokens: Path, changed: int) -> tuple[str | None, str | None]:
    """SHA-256 of the text that a file of tokens was cut from, and how others read that text otherwise, in words.

    `changed`: when the file was, so that it is read once.
    """
    content = json.loads(tokens.read_text(encoding="utf-8"))
    return content.get("text_sha256"), content.get("tokenizer_differs")


def other_tokens(cell: Mapping[str, Any]) -> str | None:
    """How others read one of the model's texts otherwise, in words; None where all make the same tokens of them."""
    folder = Path(cell.get("evaluation") or "").parent
    paths = (folder / f"{text}.json" for text in ("evaluation", "prompts", "calibration", "burst"))
    return next(
        (said for path in paths if path.is_file() and (said := of_tokens(path, path.stat().st_mtime_ns)[1])), None
    )


def read_part(
    cell: Mapping[str, Any], config: Mapping[str, Any], name: str
) -> tuple[dict[str, Any] | None, str | None]:
    """What one job of a cell left, or None and why there is nothing."""
    if cell[name] is None:
        return None, cell["absent"].get(name)
    if why := absence(cell, name):
        return None, why
    path = Path(cell[name])
    if name == "artifact":
        return manifest.read(path), None
    found = read(path, name.replace("_", " "))
    if name == "noise_floor":
        other = other_protocol(cell, config, found)
        why = f"was measured with another {', '.join(other)}{AGAIN}" if other else None
    else:
        why = mismatch(cell, config, found)
    if not why and not found["summary"]:
        why = found["reason"]
    return (None, why) if why else (found, None)


def hash_files(artifact: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with one hash in place of its files': the SHA-256 of `sha256sum`'s lines for them, sorted by name."""
    lines = [f"{file['sha256']}  {name}\n" for name, file in sorted(artifact["files"].items())]
    kept = {name: value for name, value in artifact.items() if name != "files"}
    return kept | {"files_sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}


def drop_raw(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured with a longer prompt or a batch, without single runs and tokens."""
    return {name: value for name, value in entry.items() if name not in ("runs", "output_ids", "deterministic")}


def row(cell: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the report, with what the page and the comparisons need beyond the columns of results.csv.

    A part that failed leaves its columns empty, and `missing` says what its log said.
    """
    parts = {name: read_part(cell, config, name) for name in PARTS}
    found = {"cell": cell} | {name: content for name, (content, _) in parts.items()}
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
    return {
        **values,
        **ADDED[1],
        **{name: cell.get(name, value) for name, value in (DEFAULTS | {"prebuilt": False}).items()},
        "group_size": values["group_size"],
        "degenerate": speed and repetition.of_result(speed),
        "missing": missing,
        **speed_details(speed),
        **quality_details(loss),
        "protocol": {name: each and each["protocol"] for name, each in (("latency", speed), ("quality", loss))},
        "noise_floor": noise and {name: noise[name] for name in ("summary", "compute_type")},
        "artifact": artifact and hash_files(artifact),
    }


def speed_details(speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a row keeps of its latency beyond the columns; None of each where it was not measured."""
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
        **{name: [drop_raw(entry) for entry in speed[name]] for name in ("lengths", "batches")},
        "device_details": speed["device"],
    }


def quality_details(loss: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a row keeps of its quality beyond the columns; None of each where it was not measured."""
    return {
        "quality_summary": loss and loss["summary"],
        "quality_windows": loss and loss["windows"],
        "quality_totals": loss and {name: loss[name] for name in TOTALS},
        "headline": loss and loss["headline"],
        "normalised": loss and loss["normalised"],
    }


def mark_noise(rows: Sequence[dict[str, Any]], reference: str) -> None:
    """Set `above_noise_floor` of rows whose engine does not tell the whole divergence: whether `kld_lower_bound` is
    above that of the reference's own weights in the same engine without options. That row is the floor, and not above
    it."""
    told = [each for each in rows if each["kld_mean"] is None and each["kld_lower_bound"] is not None]
    floors = {
        (each["model"], each["engine"]): each["kld_lower_bound"]
        for each in told
        if each["format"] == reference and not each["options"]
    }
    for each in told:
        floor = floors.get((each["model"], each["engine"]))
        if floor is not None:
            each["above_noise_floor"] = each["kld_lower_bound"] > floor
            each["missing"].pop("above_noise_floor", None)


def collect(study: Mapping[str, Any]) -> dict[str, Any]:
    """results.json: the rows, the config that they come from, and the versions of this file and of the metrics."""
    rows = [row(cell, study["config"]) for cell in study["cells"]]
    reference = study["config"]["reference"]
    bandwidth.share(rows)
    mark_noise(rows, reference)
    mark_pareto(rows)
    by_key = {key(each): each for each in rows}
    for each, one in zip(rows, study["cells"], strict=True):
        against = by_key.get((each["model"], reference, None))
        relate(each, against)
        repetition.relate(each, against)
        each["warnings"] = caveats.all_of(each, reference, other_tokens(one))
    return {
        "schema_version": SCHEMA_VERSION,
        "metrics_version": METRICS_VERSION,
        "units": {column.name: column.unit for column in COLUMNS if column.unit},
        "config": study["config"],
        "rows": rows,
    }


def upgrade(content: Mapping[str, Any]) -> dict[str, Any]:
    """results.json of an older schema version as one of today: what its rows lack is empty and says why."""
    version = content.get("schema_version")
    if version not in (1, 2, 3):
        return dict(content)
    added = {name: value for since, names in ADDED.items() if version <= since for name, value in names.items()}
    reasons = {name: why for name, why in REASONS.items() if name in added}
    rows = [
        added | row | {"engine": RENAMED.get(row["engine"], row["engine"]), "missing": reasons | row["missing"]}
        for row in content["rows"]
    ]
    found = {**content, "schema_version": SCHEMA_VERSION, "rows": rows}
    if "loads" in content:
        empty = dict.fromkeys(LOADS_ADDED)
        found["loads"] = [empty | row | {"missing": LOADS_ADDED | row["missing"]} for row in content["loads"]]
    return found


def failures(row: Mapping[str, Any]) -> list[str]:
    """Why parts of a row are not there though the study asked for them; nothing where the row is whole."""
    return list(dict.fromkeys(why for why in row["missing"].values() if why.startswith(FAILED) or why.endswith(AGAIN)))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column] = COLUMNS) -> None:
    """A table of so many columns; what was not measured is an empty cell, an empty list `none`."""
    lists = [column.name for column in columns if column.kind == "array"]
    with path.open("w", newline="", encoding="utf-8") as file:
        names = [column.name for column in columns]
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for each in rows:
            words = {name: each[name] and "; ".join(each[name]) for name in lists}
            writer.writerow(each | {name: "none" if text == [] else text for name, text in words.items()})
