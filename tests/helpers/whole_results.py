"""results.json as a study of small made-up measurements writes it, every part filled in as the programs fill it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantmill.metrics import METRICS_VERSION
from quantmill.report import columns, results

WINDOWS = 30
LATENCY_PROTOCOL = {
    "batch": 1,
    "decoding": "greedy, end-of-sequence disabled",
    "new_tokens": 200,
    "repeats": 2,
    "processes": 2,
    "warm_up": "once",
    "prompt_tokens": [512],
    "batch_sizes": [1, 4],
}
QUALITY_PROTOCOL = {
    "perplexity": "gptq-2048",
    "windows": WINDOWS,
    "text_sha256": "ab12",
    "unit": "tokens",
    "bytes": 9000,
    "words": 1500,
    "tokens": 3000,
    "window": 101,
    "dropped_tokens": 0,
}


def cell(
    folder: Path, name: str, rate: float, nll: list[float] | None, model: str = "m", kld: float = 1.0
) -> dict[str, Any]:
    """Write an artifact's manifest and its results; return the cell of study.json that names them."""
    artifact = folder / model / name
    artifact.mkdir(parents=True)
    manifest = {
        "source": {},
        "bits_per_weight": 8.0,
        "bytes": 10,
        "build_s": 1.0,
        "files": {"b": {"sha256": "12"}, "a": {"sha256": "ef"}},
        "tool": "t",
        "tool_version": "1",
    }
    (artifact / "quantmill.json").write_text(json.dumps(manifest))
    common = {"metrics_version": METRICS_VERSION, "compute_type": "float32", "versions": {}, "device": {"name": "d"}}
    common["artifact"] = manifest
    speed = dict.fromkeys(columns.figures("latency"), 1.0) | {"tokens_per_second": rate}
    speed |= {"tokens_per_second_low": rate * 0.9, "tokens_per_second_high": rate * 1.1}
    protocol = {"new_tokens": 2, "repeats": 1, "processes": 1}
    latency = {
        "kind": "latency",
        "mode": "fake",
        "deterministic": True,
        "other_modes": [],
        "summary": speed,
        "protocol": protocol,
    }
    latency |= {"prompts": [], "runs": [{"prompt": 0, "token_seconds": [0.1, 0.2]}]}
    latency |= {"interference": [], "conditions": [], "lengths": [], "batches": []}
    latency |= {"copy_bandwidth_bytes_per_second": 1.0, "device": {"name": "d", "device": "cpu", "threads": 1}}
    (artifact / "latency").write_text(json.dumps(common | latency))
    if nll is not None:
        quality = {"kind": "quality", "summary": dict.fromkeys(columns.figures("quality"), 1.0) | {"perplexity": 2.0}}
        windows = {"nll": nll, "tokens": [100] * WINDOWS, "counts": [50.0] * WINDOWS, "kld": [kld] * WINDOWS}
        quality |= {"windows": windows, "protocol": {"text_sha256": "x"}, "headline": "word_perplexity"}
        quality |= dict.fromkeys(results.TOTALS, 1) | {"normalised": {}}
        (artifact / "quality").write_text(json.dumps(common | quality))
    noise = folder / "noise"
    floor = {"kind": "noise floor", "summary": {"kld_mean": 0.001}, "windows": {"kld": [0.1] * 3}, "protocol": {}}
    noise.write_text(json.dumps(common | floor))
    return {
        "model": model,
        "format": name,
        "engine": "fake",
        "artifact": str(artifact),
        "latency": str(artifact / "latency"),
        "quality": str(artifact / "quality") if nll is not None else None,
        "noise_floor": str(noise) if nll is not None else None,
        "absent": {} if nll is not None else {"quality": "random weights", "noise_floor": "random weights"},
        "logs": {part: [str(artifact / "log")] for part in ("artifact", "latency", "quality", "noise_floor")},
    }


def window_losses(extra: float, wobble: float = 0.0) -> list[float]:
    """NLL of windows that differ a lot among themselves, plus something more a window."""
    return [100.0 + 10 * (i % 7) + extra + wobble * (-1) ** i for i in range(WINDOWS)]


def edit(path: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(Path(path).read_text())
    change(content)
    Path(path).write_text(json.dumps(content))


def whole_cell(folder: Path, name: str, rate: float, nll: list[float] | None, **options: Any) -> dict[str, Any]:
    """Write a cell like `cell`, with the parts that it leaves out."""
    made = cell(folder, name, rate, nll, **options)
    variant = {"new_tokens": 64, "ttft_ms_p50": 3.0, "tpot_ms_p50": 1.0, "tokens_per_second": 900.0}

    def latency(content: dict[str, Any]) -> None:
        content["protocol"] = LATENCY_PROTOCOL
        content["summary"] |= {"ttft_ms_p90": 1.2, "tpot_ms_p90": 1.1, "peak_memory_bytes": 1000}
        content["lengths"] = [{"tokens": 512, **variant}, {"tokens": 4096, "skipped": "too long"}]
        content["batches"] = [{"batch": 4, "prompt_tokens": 9, **variant}]
        content["other_modes"] = [
            {"mode": "captured", "refused": "its tokens differ", "summary": content["summary"]},
            {"mode": "another", "refused": "its step cannot be captured"},
        ]
        conditions = {"host": {"others": 0.0}, "device": None, "decode_joules": None, "energy_from": None}
        content["conditions"] = [conditions, conditions]

    edit(made["latency"], latency)
    if nll is not None:
        edit(made["quality"], lambda content: content["protocol"].update(QUALITY_PROTOCOL))
    return made


def collect_results(cells: list[Mapping[str, Any]]) -> dict[str, Any]:
    """results.json of cells, as it reads once it was written."""
    models = {each["model"]: {} for each in cells}
    config = {"reference": "reference", "models": models, "perplexity": "gptq-2048"}
    return json.loads(json.dumps(results.collect({"config": config, "cells": cells})))


def set_rate(row: dict[str, Any], rate: float, low: float, high: float) -> None:
    for name in ("tokens_per_second", "deployed_tokens_per_second"):
        row |= {name: rate, f"{name}_low": low, f"{name}_high": high}
