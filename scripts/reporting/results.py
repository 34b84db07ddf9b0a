"""Rows: one a model and format, joined from an artifact's manifest, its latency and its quality.

A cell that was not measured is None, and `missing` says why; it is never filled with a guess.
"""

import csv
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import manifest
from common.program import UserError
from metrics import METRICS_VERSION
from reporting import bandwidth, caveats, loops
from reporting.pareto import COMPARED, compare, mark_pareto

SCHEMA_VERSION = 2

# results.csv, in this order: column -> unit (an empty one for names and pure numbers)
COLUMNS = {
    "model": "",
    "format": "",
    "engine": "",
    "device": "",
    "bits_per_weight": "bit",
    "size_bytes": "B",
    "perplexity": "",
    "perplexity_low": "",
    "perplexity_high": "",
    "kld_mean": "nat",
    "kld_median": "nat",
    "kld_p99": "nat",
    "top1_agreement": "",
    "ttft_ms_p50": "ms",
    "tpot_ms_p50": "ms",
    "tpot_ms_p99": "ms",
    "tokens_per_second": "1/s",
    "tokens_per_second_low": "1/s",
    "tokens_per_second_high": "1/s",
    "peak_memory_bytes": "B",
    "bandwidth_fraction": "",
    "pareto": "",
    "build_seconds": "s",
    "joules_per_token": "J",
    "interference": "",
    "kld_p999": "nat",
    "kld_max": "nat",
    "kld_noise_floor": "nat",
    "above_noise_floor": "",
    "delta_p_rms": "",
    "nll_difference": "nat/token",
    "nll_difference_low": "nat/token",
    "nll_difference_high": "nat/token",
    "nll_verdict": "",
    "group_size": "",
}
# what a row of schema version 1 lacks
ADDED: dict[str, Any] = {
    "group_size": None,
    "dominated_by": None,
    "degenerate": None,
    "warnings": [],
    "device_bandwidth": None,
}

QUALITY = (
    *("perplexity", "perplexity_low", "perplexity_high", "kld_mean", "kld_median", "kld_p99", "kld_p999", "kld_max"),
    *("top1_agreement", "delta_p_rms"),
)
TOTALS = ("total_nll", "scored_tokens", "tokens", "words", "bytes")
LATENCY = (
    *("ttft_ms_p50", "tpot_ms_p50", "tpot_ms_p99", "tokens_per_second", "tokens_per_second_low"),
    *("tokens_per_second_high", "peak_memory_bytes", "bandwidth_fraction", "joules_per_token"),
)

PARTS = ("artifact", "latency", "quality", "noise_floor")  # what the jobs of a cell leave
PENDING = "still to come: the study is running"
# how reasons begin and end that another run can take away
FAILED, AGAIN = "failed", "; run again"
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


def failure(logs: Sequence[str]) -> str:
    """Why a job left nothing: the error of the first of its logs that ends with one, ours or a library's, upstream
    first."""
    for log in logs:
        lines = Path(log).read_text(encoding="utf-8", errors="replace").split("\n") if Path(log).exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if last.startswith("error: ") or EXCEPTION.match(last):
            return f"{FAILED}: {last.removeprefix('error: ')}"
    return f"{FAILED}, or never ran: see {logs[-1]}"


def unfit(cell: Mapping[str, Any], config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Why a latency or quality result is not of the artifact that is there and of the study's protocol; None where it
    is. After an edit, what was measured before lies there until its job has run again."""
    path = Path(cell["artifact"])
    if not (path / manifest.NAME).exists():
        return failure(cell["logs"]["artifact"])
    if result["artifact"]["files"] != manifest.read(path)["files"]:
        return f"was measured of another build{AGAIN}"
    asked = {**config.get("latency", {}), "perplexity": config.get("perplexity")}
    other = [name for name, value in result["protocol"].items() if asked.get(name, value) != value]
    return f"was measured with another {', '.join(other)}{AGAIN}" if other else None


def part(cell: Mapping[str, Any], config: Mapping[str, Any], name: str) -> tuple[dict[str, Any] | None, str | None]:
    """What one job of a cell left, or None and why there is nothing."""
    if cell[name] is None:
        return None, cell["no_quality"]
    if name in cell.get("pending", ()):
        return None, PENDING
    path = Path(cell[name])
    if not (path / manifest.NAME if name == "artifact" else path).exists():
        return None, failure(cell["logs"][name])
    if name == "artifact":
        return manifest.read(path), None
    found = read(path, name.replace("_", " "))
    why = None if name == "noise_floor" else unfit(cell, config, found)
    return (None, why) if why else (found, None)


def without_files(artifact: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with one hash in place of its files': the SHA-256 of `sha256sum`'s lines for them, sorted by name."""
    lines = [f"{file['sha256']}  {name}\n" for name, file in sorted(artifact["files"].items())]
    kept = {name: value for name, value in artifact.items() if name != "files"}
    return kept | {"files_sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}


def group_size(artifact: Mapping[str, Any]) -> int | None:
    """How many weights share a scale, as GPTQ's or AWQ's parameters say; None of formats without that choice."""
    parameters = artifact.get("parameters") or {}
    return parameters.get("group_size", parameters.get("q_group_size"))


def without_raw(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured with a longer prompt or a batch, without single runs and tokens."""
    return {name: value for name, value in entry.items() if name not in ("runs", "output_ids", "deterministic")}


def mean_kld(windows: Mapping[str, Any], count: int) -> float:
    """Mean KL divergence over the first windows: the noise floor is measured on few."""
    return sum(windows["kld"][:count]) / sum(windows["tokens"][:count])


def row(cell: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the report, with what the page and the comparisons need beyond the columns of results.csv.

    A part that failed leaves its columns empty, and `missing` says what its log said.
    """
    artifact, unbuilt = part(cell, config, "artifact")
    speed, unmeasured = part(cell, config, "latency")
    loss, unscored = part(cell, config, "quality")
    noise, without_noise = part(cell, config, "noise_floor")
    floor = noise["summary"]["kld_mean"] if noise and noise["summary"] else None
    above = None if floor is None or not loss else mean_kld(loss["windows"], len(noise["windows"]["kld"])) > floor
    columns: dict[str, Any] = {
        "model": cell["model"],
        "format": cell["format"],
        "engine": cell["engine"],
        "device": speed["device"]["name"] if speed else None,
        "bits_per_weight": artifact["bits_per_weight"] if artifact else None,
        "size_bytes": artifact["bytes"] if artifact else None,
        **{name: loss["summary"][name] if loss else None for name in QUALITY},
        **{name: speed["summary"][name] if speed else None for name in LATENCY},
        "pareto": None,
        "build_seconds": artifact["build_seconds"] if artifact else None,
        "interference": speed["interference"] if speed else None,
        "kld_noise_floor": floor,
        "above_noise_floor": above,
        **dict.fromkeys(COMPARED),
        "group_size": artifact and group_size(artifact),
    }
    missing: dict[str, str] = {}
    if unbuilt:
        unmeasured = unscored = unbuilt
        missing |= dict.fromkeys(("bits_per_weight", "size_bytes", "build_seconds", "group_size"), unbuilt)
    elif artifact and artifact["bits_per_weight"] is None:
        missing["bits_per_weight"] = "its number of parameters is not known"
    if columns["group_size"] is None:
        missing.setdefault("group_size", "nobody chose one for this format")
    if not speed:
        missing |= dict.fromkeys(("device", "interference", *LATENCY), unmeasured)
    elif columns["joules_per_token"] is None:
        missing["joules_per_token"] = "the device does not tell its energy, or the measurement was too short for it"
    if not loss:
        missing |= dict.fromkeys((*QUALITY, *COMPARED), unscored)
    if floor is None:
        missing["kld_noise_floor"] = noise["reason"] if noise else without_noise
    if above is None:
        missing["above_noise_floor"] = unscored or missing["kld_noise_floor"]
    return {
        **{name: columns[name] for name in COLUMNS},
        **ADDED,
        "group_size": columns["group_size"],
        "degenerate": speed and loops.of_result(speed),
        "missing": missing,
        **speed_details(speed),
        **quality_details(loss),
        "protocol": {name: each and each["protocol"] for name, each in (("latency", speed), ("quality", loss))},
        "noise_floor": {name: noise[name] for name in ("summary", "compute_type")} if floor is not None else None,
        "artifact": artifact and without_files(artifact),
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
            | {name: way.get("summary", {}).get(name) for name in LATENCY}
            for way in speed["other_modes"]
        ],
        "latency_summary": speed["summary"],
        **{name: [without_raw(entry) for entry in speed[name]] for name in ("lengths", "batches")},
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


def collect(study: Mapping[str, Any]) -> dict[str, Any]:
    """results.json: the rows, the config that they come from, and the versions of this file and of the metrics."""
    rows = [row(cell, study["config"]) for cell in study["cells"]]
    bandwidth.share(rows)
    mark_pareto(rows)
    name = study["config"]["reference"]
    for each in rows:
        reference = next((other for other in rows if (other["model"], other["format"]) == (each["model"], name)), None)
        compare(each, reference)
        loops.compare(each, reference)
        each["warnings"] = caveats.all_of(each, name)
    return {
        "schema_version": SCHEMA_VERSION,
        "metrics_version": METRICS_VERSION,
        "units": {name: unit for name, unit in COLUMNS.items() if unit},
        "config": study["config"],
        "rows": rows,
    }


def current(content: Mapping[str, Any]) -> dict[str, Any]:
    """results.json of an older schema version as one of today: what its rows lack is null and says why."""
    if content.get("schema_version") != 1:
        return dict(content)
    lacks = {"missing": {"group_size": "not recorded by schema version 1"}}
    rows = [ADDED | row | {"missing": lacks["missing"] | row["missing"]} for row in content["rows"]]
    return {**content, "schema_version": SCHEMA_VERSION, "rows": rows}


def unfinished_because(row: Mapping[str, Any]) -> list[str]:
    """Why parts of a row are not there though the study asked for them; nothing where the row is whole."""
    return list(dict.fromkeys(why for why in row["missing"].values() if why.startswith(FAILED) or why.endswith(AGAIN)))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """results.csv: exactly `COLUMNS`; what was not measured is an empty cell, no interference is `none`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(COLUMNS), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for each in rows:
            said = each["interference"]
            writer.writerow({**each, "interference": None if said is None else "; ".join(said) or "none"})
