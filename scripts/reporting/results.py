"""Rows: one a model and format, joined from an artifact's manifest, its latency and its quality.

A cell that was not measured is None, and `missing` says why; it is never filled with a guess.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import manifest
from common.program import UserError
from metrics import METRICS_VERSION, perplexity

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
    "kld_p999": "nat",
    "kld_max": "nat",
    "kld_noise_floor": "nat",
    "above_noise_floor": "",
    "delta_p_rms": "",
    "nll_difference": "nat/token",
    "nll_difference_low": "nat/token",
    "nll_difference_high": "nat/token",
    "nll_verdict": "",
}

QUALITY = (
    *("perplexity", "perplexity_low", "perplexity_high", "kld_mean", "kld_median", "kld_p99", "kld_p999", "kld_max"),
    *("top1_agreement", "delta_p_rms"),
)
# of a row beside its model's reference: None until all rows are there
COMPARED = ("nll_difference", "nll_difference_low", "nll_difference_high", "nll_verdict")
TOTALS = ("total_nll", "scored_tokens", "tokens", "words", "bytes")
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


def mean_kld(windows: Mapping[str, Any], count: int) -> float:
    """Mean KL divergence over the first windows: the noise floor is measured on few."""
    return sum(windows["kld"][:count]) / sum(windows["tokens"][:count])


def row(cell: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the report, with what the page and the comparisons need beyond the columns of results.csv."""
    artifact = manifest.read(Path(cell["artifact"]))
    speed = read(Path(cell["latency"]), "latency")
    loss = read(Path(cell["quality"]), "quality") if cell["quality"] else None
    noise = read(Path(cell["noise_floor"]), "noise floor") if cell["noise_floor"] else None
    floor = noise["summary"]["kld_mean"] if noise and noise["summary"] else None
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
        "kld_noise_floor": floor,
        "above_noise_floor": None if floor is None else mean_kld(loss["windows"], len(noise["windows"]["kld"])) > floor,
        **dict.fromkeys(COMPARED),
    }
    missing = {} if loss else dict.fromkeys((*QUALITY, *COMPARED), cell["no_quality"])
    if floor is None:
        why = noise["reason"] if noise else cell["no_quality"]
        missing |= dict.fromkeys(("kld_noise_floor", "above_noise_floor"), why)
    if columns["joules_per_token"] is None:
        missing["joules_per_token"] = "the device does not tell its energy, or the measurement was too short for it"
    return {
        **{name: columns[name] for name in COLUMNS},
        "compute_type": speed["compute_type"],
        "mode": speed["mode"],
        "other_modes": [
            {"mode": way["mode"], "refused": way["refused"], "differs": way.get("differs")}
            | {name: way["summary"][name] for name in LATENCY}
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
        "quality_totals": {name: loss[name] for name in TOTALS} if loss else None,
        "headline": loss["headline"] if loss else None,
        "normalised": loss["normalised"] if loss else None,
        "noise_floor": {name: noise[name] for name in ("summary", "compute_type")} if floor is not None else None,
        "device_details": speed["device"],
        "copy_bandwidth_bytes_per_second": speed["copy_bandwidth_bytes_per_second"],
        "artifact": {name: value for name, value in artifact.items() if name != "files"},
    }


def comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows have a quality, of the same windows of the same text."""
    windows = [row["quality_windows"] for row in (one, other)]
    if None in windows or windows[0]["tokens"] != windows[1]["tokens"]:
        return False
    texts = {row["protocol"]["quality"]["text_sha256"] for row in (one, other)}
    return len(texts) == 1


def difference(candidate: Mapping[str, Any], reference: Mapping[str, Any], unit: str) -> tuple[float, ...]:
    """NLL of one row less that of another, for each of `unit` (`tokens`, or `counts`: what the headline divides by),
    with its paired 95% interval and whether that holds 0."""
    one, other = candidate["quality_windows"], reference["quality_windows"]
    return perplexity.paired_difference(np.array(one["nll"]), np.array(other["nll"]), np.array(one[unit]))


def perplexity_ratio(candidate: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any] | None:
    """Perplexity of one row over another's with its paired 95% interval; `tie` where that holds 1. None where the two
    cannot be compared."""
    if not comparable(candidate, reference):
        return None
    nll, low, high, tie = difference(candidate, reference, "counts")
    return {"ratio": math.exp(nll), "low": math.exp(low), "high": math.exp(high), "tie": tie}


def compare(each: dict[str, Any], reference: Mapping[str, Any] | None) -> None:
    """Set what a row says of itself beside its model's reference."""
    each["perplexity_ratio"] = perplexity_ratio(each, reference) if reference else None
    if each["perplexity_ratio"] is None:
        for name in COMPARED:
            each["missing"].setdefault(name, "nothing to compare it with")
        return
    nll, low, high, tie = difference(each, reference, "tokens")
    verdict = "reference" if each is reference else "tie" if tie else "worse" if nll > 0 else "better"
    each |= dict(zip(COMPARED, (nll, low, high, verdict), strict=True))


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
        reference = (
            other
            for other in rows
            if other["model"] == each["model"] and other["format"] == study["config"]["reference"]
        )
        compare(each, next(reference, None))
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
