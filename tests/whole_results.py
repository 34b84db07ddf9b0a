"""results.json as a study of small made-up measurements writes it, every part filled in as the programs fill it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from test_results import WINDOWS, cell

from reporting import results

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


def edit(path: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(Path(path).read_text())
    change(content)
    Path(path).write_text(json.dumps(content))


def whole(folder: Path, name: str, rate: float, nll: list[float] | None, **options: Any) -> dict[str, Any]:
    """A cell as `test_results.cell` writes it, with the parts that its tests leave out."""
    made = cell(folder, name, rate, nll, **options)
    variant = {"new_tokens": 64, "ttft_ms_p50": 3.0, "tpot_ms_p50": 1.0, "tokens_per_second": 900.0}

    def latency(content: dict[str, Any]) -> None:
        content["protocol"] = LATENCY_PROTOCOL
        content["summary"] |= {"ttft_ms_p90": 1.2, "tpot_ms_p90": 1.1, "peak_memory_bytes": 1000}
        content["lengths"] = [{"tokens": 512, **variant}, {"tokens": 4096, "skipped": "too long"}]
        content["batches"] = [{"batch": 4, "prompt_tokens": 9, **variant}]
        content["other_modes"] = [{"mode": "captured", "refused": "its tokens differ", "summary": content["summary"]}]
        conditions = {"host": {"others": 0.0}, "device": None, "decode_joules": None, "energy_from": None}
        content["conditions"] = [conditions, conditions]

    edit(made["latency"], latency)
    if nll is not None:
        edit(made["quality"], lambda content: content["protocol"].update(QUALITY_PROTOCOL))
    return made


def collected(cells: list[Mapping[str, Any]]) -> dict[str, Any]:
    """results.json of cells, as it reads once it was written."""
    models = {each["model"]: {} for each in cells}
    config = {"reference": "reference", "models": models, "perplexity": "gptq-2048"}
    return json.loads(json.dumps(results.collect({"config": config, "cells": cells})))
