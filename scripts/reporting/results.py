"""Rows: one a model and format, joined from an artifact's manifest, its latency and its quality.

A cell that was not measured is None, and `missing` says why; it is never filled with a guess.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import manifest
from common.program import UserError
from metrics import METRICS_VERSION, bootstrap, perplexity

SCHEMA_VERSION = 1

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
}

QUALITY = ("perplexity", "perplexity_low", "perplexity_high", "kld_mean", "kld_median", "kld_p99", "top1_agreement")
LATENCY = (
    *("ttft_ms_p50", "tpot_ms_p50", "tpot_ms_p99", "tokens_per_second", "tokens_per_second_low"),
    *("tokens_per_second_high", "peak_memory_bytes", "bandwidth_fraction", "joules_per_token"),
)


def read(path: Path, kind: str) -> dict[str, Any]:
    """A result file. Raises `UserError` where another version of the metrics made it."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["kind"] != kind or result["metrics_version"] != METRICS_VERSION:
        raise UserError(
            f"{path}: is a {result['kind']} result of metrics version {result['metrics_version']}, "
            f"not a {kind} result of version {METRICS_VERSION}; delete it and measure again"
        )
    return result


def without_raw(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured with a longer prompt or a batch, without single runs and tokens."""
    return {name: value for name, value in entry.items() if name not in ("runs", "output_ids")}


def row(cell: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the report, with what the page and the comparisons need beyond the columns of results.csv."""
    artifact = manifest.read(Path(cell["artifact"]))
    speed = read(Path(cell["latency"]), "latency")
    loss = read(Path(cell["quality"]), "quality") if cell["quality"] else None
    columns: dict[str, Any] = {
        "model": cell["model"],
        "format": cell["format"],
        "engine": cell["engine"],
        "device": speed["device"]["name"],
        "bits_per_weight": artifact["bits_per_weight"],
        "size_bytes": artifact["bytes"],
        **{name: loss["summary"][name] if loss else None for name in QUALITY},
        **{name: speed["summary"][name] for name in LATENCY},
        "pareto": None,
        "build_seconds": artifact["build_seconds"],
        "interference": speed["interference"],
    }
    missing = {} if loss else dict.fromkeys(QUALITY, cell["no_quality"])
    if columns["joules_per_token"] is None:
        missing["joules_per_token"] = "the device does not tell its energy, or the measurement was too short for it"
    return {
        **{name: columns[name] for name in COLUMNS},
        "compute_type": speed["compute_type"],
        "mode": speed["mode"],
        "other_modes": [
            {"mode": way["mode"], "refused": way["refused"]}
            | {name: way["summary"][name] for name in LATENCY if not way["refused"]}
            for way in speed["other_modes"]
        ],
        "versions": speed["versions"],
        "threads": speed["device"].get("threads"),  # of the CPU; a GPU has none to choose
        "missing": missing,
        "protocol": {"latency": speed["protocol"], "quality": loss["protocol"] if loss else None},
        "latency_summary": speed["summary"],
        **{name: [without_raw(entry) for entry in speed[name]] for name in ("lengths", "batches")},
        "conditions": speed["conditions"],
        "quality_summary": loss["summary"] if loss else None,
        "quality_windows": loss["windows"] if loss else None,
        "device_details": speed["device"],
        "copy_bandwidth_bytes_per_second": speed["copy_bandwidth_bytes_per_second"],
        "artifact": {name: value for name, value in artifact.items() if name != "files"},
    }


def perplexity_ratio(candidate: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any] | None:
    """Perplexity of one row over another's with its paired 95% interval; `tie` where that holds 1.

    The same windows are resampled in both, so what makes a window hard for either cancels. None where either row has
    no quality, or they were scored on different texts.
    """
    one, other = candidate["quality_windows"], reference["quality_windows"]
    if one is None or other is None or one["tokens"] != other["tokens"]:
        return None
    if candidate["protocol"]["quality"]["text_sha256"] != reference["protocol"]["quality"]["text_sha256"]:
        return None
    difference, tokens = np.subtract(one["nll"], other["nll"]), np.array(one["tokens"])
    replicates = perplexity.ratio_of_sums(difference, tokens, bootstrap.indices(len(tokens)))
    low, high = np.exp(bootstrap.interval(replicates, len(tokens)))
    ratio = perplexity.perplexity(difference, tokens)
    return {"ratio": ratio, "low": float(low), "high": float(high), "tie": bool(low <= 1 <= high)}


def faster(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one row is faster beyond both intervals."""
    return one["tokens_per_second_low"] > other["tokens_per_second_high"]


def better(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one row's perplexity is lower and the paired interval of the ratio leaves 1 out."""
    ratio = perplexity_ratio(one, other)
    return ratio is not None and ratio["high"] < 1


def dominated(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether another row is significantly better in quality or speed, and significantly worse in neither."""
    return any(
        (faster(other, row) or better(other, row)) and not faster(row, other) and not better(row, other)
        for other in others
    )


def mark_pareto(rows: Sequence[dict[str, Any]]) -> None:
    """Set `pareto` of every row that has a quality: true where no row of its model and device dominates it."""
    for each in rows:
        if each["perplexity"] is None:
            each["missing"]["pareto"] = "no quality to weigh against the speed"
            continue
        others = [
            other
            for other in rows
            if other is not each
            and (other["model"], other["device"]) == (each["model"], each["device"])
            and other["perplexity"] is not None
        ]
        each["pareto"] = not dominated(each, others)


def collect(study: Mapping[str, Any]) -> dict[str, Any]:
    """results.json: the rows, the config that they come from, and the versions of this file and of the metrics."""
    rows = [row(cell) for cell in study["cells"]]
    mark_pareto(rows)
    for each in rows:
        reference = [
            other
            for other in rows
            if other["model"] == each["model"] and other["format"] == study["config"]["reference"]
        ]
        each["perplexity_ratio"] = perplexity_ratio(each, reference[0]) if reference else None
    return {
        "schema_version": SCHEMA_VERSION,
        "metrics_version": METRICS_VERSION,
        "units": {name: unit for name, unit in COLUMNS.items() if unit},
        "config": study["config"],
        "rows": rows,
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """results.csv: exactly `COLUMNS`; what was not measured is an empty cell, no interference is `none`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(COLUMNS), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "interference": "; ".join(row["interference"]) or "none"} for row in rows)
