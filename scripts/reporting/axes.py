"""What the plots show of the rows, and on which axes."""

from collections.abc import Mapping, Sequence
from typing import Any

from reporting.labels import label

# column -> title and scale: of costs ratios matter, and zero is a divergence too
QUALITIES = {
    "perplexity": ("perplexity (less is better)", "linear"),
    "kld_mean": ("mean KL divergence, nats (less is better)", "symlog"),
    "top1_agreement": ("same first choice as the reference (more is better)", "linear"),
}
COSTS = {
    "tokens_per_second": ("tokens per second (more is better)", "log"),
    "ttft_ms_p50": ("time to first token, ms (less is better)", "log"),
    "peak_memory_bytes": ("peak memory, bytes (less is better)", "log"),
    "size_bytes": ("size, bytes (less is better)", "log"),
}
INTERVALS = ("perplexity", "tokens_per_second")
MORE_IS_BETTER = ("top1_agreement", "tokens_per_second")


def is_task(name: str) -> bool:
    """Whether an axis is a task's: a share of right answers, of which more is better."""
    return name.startswith("task_")


def qualities(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """`QUALITIES`, and those of the tasks that the rows of `points` have."""
    tasks = [name for name in (rows[0] if rows else ()) if is_task(name)]
    titles = {name: name.removeprefix("task_").removesuffix("_score") for name in tasks}
    return QUALITIES | {name: (f"{title}: right answers (more is better)", "linear") for name, title in titles.items()}


def points(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What the plots show of the rows. `tasks`: columns of tasks that can be an axis.

    The perplexity intervals are those of the difference from the reference on the same windows: how the perplexity
    would move with another text is common to all formats of a model, and would hide what sets them apart. `roofline`:
    tokens/s if each token's weights were read at the speed of a copy; no mark where the model fits in a cache. A label
    says where the speed was disturbed.
    """
    several = len({row["model"] for row in rows}) > 1
    names = (*QUALITIES, *tasks, *COSTS, *(f"{name}{end}" for name in INTERVALS for end in ("_low", "_high")))
    shown = []
    for row in rows:
        value = {name: row[name] for name in ("model", "format", "device", "pareto", "compute_type", *names)}
        value["cell"] = label(row)
        value["disturbed"] = bool(row["interference"])
        mark = " (disturbed)" if row["interference"] else ""
        value["label"] = (f"{row['model']}: {label(row)}" if several else label(row)) + mark
        paired = row["perplexity_ratio"]
        if paired:  # the reference's perplexity as it is, and only what the format changes with its uncertainty
            base = row["perplexity"] / paired["ratio"]
            value |= {"perplexity_low": base * paired["low"], "perplexity_high": base * paired["high"]}
        fraction = row["bandwidth_fraction"]
        value["roofline"] = row["tokens_per_second"] / fraction if fraction and 0.05 < fraction < 1 else None
        shown.append(value)
    return shown
