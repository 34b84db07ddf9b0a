"""Points and axes of the plots."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantmill.report import caveats, deployed, memory
from quantmill.report.labels import label
from quantmill.report.rows import Row

# column -> title and scale: of costs ratios matter, and zero is a divergence too
QUALITIES = {
    "perplexity": ("perplexity (less is better)", "linear"),
    "perplexity_loss": ("perplexity above the reference's (less is better)", "symlog"),
    "kld_mean": ("mean KL divergence, nats (less is better)", "symlog"),
    "top1_agreement": ("top-1 agreement with the reference (more is better)", "linear"),
}
COSTS = {
    "tokens_per_second": ("tokens per second (more is better)", "log"),
    "ttft_ms_p50": ("time to first token, ms (less is better)", "log"),
    "peak_memory_bytes": ("peak memory, bytes (less is better)", "log"),
    "size_bytes": ("size, bytes (less is better)", "log"),
    "bits_per_weight": ("size, bits per weight (less is better)", "log"),
}
MEMORY = {memory.TOTAL: ("memory in use, bytes (less is better)", "log")}  # of a study that asks for it
SIZES = ("size_bytes", "bits_per_weight", memory.TOTAL)  # which nothing disturbs
INTERVALS = ("perplexity", "perplexity_loss", "tokens_per_second")
LOSS = ("perplexity_loss", "perplexity_loss_low", "perplexity_loss_high")  # of no column: the ratio less one
SPEED = ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high")
MORE_IS_BETTER = ("top1_agreement", "tokens_per_second")


def is_task(name: str) -> bool:
    """Return whether an axis is a task's: a share of right answers, of which more is better."""
    return name.startswith("task_")


def qualities(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return `QUALITIES`, and those of the tasks that the rows of `points` have."""
    tasks = [name for name in (rows[0] if rows else ()) if is_task(name)]
    titles = {name: name.removeprefix("task_").removesuffix("_score") for name in tasks}
    return QUALITIES | {name: (f"{title}: right answers (more is better)", "linear") for name, title in titles.items()}


def costs(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return `COSTS`, and memory in use if the rows of `points` have it."""
    return COSTS | (MEMORY if rows and memory.TOTAL in rows[0] else {})


def points(rows: Sequence[Row], tasks: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return what the plots show of the rows. `tasks`: columns of tasks that can be an axis.

    The perplexity intervals are those of the difference from the reference on the same windows: how the perplexity
    would move with another text is common to all formats of a model, and would hide what sets them apart. Tokens a
    second are the deployed ones; `own`: only Quantmill's own speed is known, and is drawn pale. `roofline`: tokens/s if
    each token's weights were read at the speed of a copy; None if the model fits in a cache.
    """
    several = len({row["model"] for row in rows}) > 1
    names = ("model", "format", "engine", "device", "pareto", "compute_type", *QUALITIES, *tasks, *COSTS)
    names += tuple(f"{name}{end}" for name in INTERVALS for end in ("_low", "_high"))
    names += tuple(name for name in MEMORY if rows and name in rows[0])
    shown = []
    for row in rows:
        value: dict[str, Any] = {name: row.get(name) for name in names}
        if found := deployed.speed(row):
            value |= dict(zip(SPEED, found, strict=True))
        value["own"] = found is None and row["tokens_per_second"] is not None
        value["cell"] = label(row)
        value["disturbed"] = bool(row["interference"])
        value["pale"] = value["own"] or value["disturbed"]
        value["unchecked"] = caveats.unchecked(row) is not None
        value["label"] = f"{row['model']}: {label(row)}" if several else label(row)
        paired = row["perplexity_ratio"]
        # the reference's perplexity as it is, and only what the format changes with its uncertainty
        if paired and row["perplexity"] is not None:
            base = row["perplexity"] / paired["ratio"]
            value |= {"perplexity_low": base * paired["low"], "perplexity_high": base * paired["high"]}
            value |= {LOSS[0]: paired["ratio"] - 1, LOSS[1]: paired["low"] - 1, LOSS[2]: paired["high"] - 1}
        fraction, rate = row["bandwidth_fraction"], row["tokens_per_second"]
        value["roofline"] = rate / fraction if rate and fraction and 0.05 < fraction < 1 else None
        shown.append(value)
    return shown


def smallest(rows: Sequence[Mapping[str, Any]], quality: str, size: str) -> list[bool]:
    """Return which points no other of their model equals or beats in quality and size, intervals left aside. Rows that
    were not checked have no place."""
    sign = -1 if quality in MORE_IS_BETTER or is_task(quality) else 1
    found = [False] * len(rows)
    best: dict[str, float] = {}
    drawn = [
        (row[size], sign * row[quality], i)
        for i, row in enumerate(rows)
        if None not in (row[size], row[quality]) and not row.get("unchecked")
    ]
    for _, loss, i in sorted(drawn):
        if loss < best.get(rows[i]["model"], math.inf):
            best[rows[i]["model"]] = loss
            found[i] = True
    return found
