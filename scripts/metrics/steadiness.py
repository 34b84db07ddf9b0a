"""Whether a load was steady: a queue that grows, or a server that becomes slower, has no figure that holds."""

import math
from collections.abc import Sequence

import numpy as np

from metrics import bootstrap
from metrics.serving import BLOCKS, Timeline, Window

DRIFT = 0.1  # of the mean, by which a figure may change over the window


def drift(times: Sequence[float], values: Sequence[float]) -> float | None:
    """How much a figure changes over its time, as a share of its mean, if that is more than `DRIFT` and no accident.

    A line through the means of `BLOCKS` blocks: its slope must be beyond Student's t at 95%. None where it is not, or
    where blocks hold nothing.
    """
    order = np.argsort(times, kind="stable")
    blocks = np.array_split(np.asarray(values, dtype=np.float64)[order], BLOCKS)
    if len(blocks[-1]) == 0:
        return None
    means = np.array([block.mean() for block in blocks])
    x = np.arange(BLOCKS) - (BLOCKS - 1) / 2
    slope = (x @ means) / (x @ x)
    error = math.sqrt(float(np.sum((means - means.mean() - slope * x) ** 2)) / (BLOCKS - 2) / float(x @ x))
    change = slope * BLOCKS / means.mean() if means.mean() else 0.0
    certain = abs(slope) > bootstrap.student_t(BLOCKS - 2) * error
    return float(change) if certain and abs(change) > DRIFT else None


def in_flight(timelines: Sequence[Timeline], times: np.ndarray) -> np.ndarray:
    """Requests that were sent and not ended at each of these times."""
    began = np.sort([each.intended for each in timelines])
    ended = np.sort([each.end for each in timelines])
    return np.searchsorted(began, times, "right") - np.searchsorted(ended, times, "right")


def instability(timelines: Sequence[Timeline], span: Window) -> str | None:
    """Why figures of this window are those of no steady state, in words: TTFT, TPOT or the queue drifts."""
    inside = [each for each in timelines if each.outcome == "ok" and span.start <= each.intended <= span.end]
    grid = np.linspace(span.start, span.end, 20 * BLOCKS)
    found = {"requests in flight": drift(grid, in_flight(timelines, grid))}
    for name in ("ttft", "tpot"):
        pairs = [(each.intended, value) for each in inside if (value := getattr(each, name)) is not None]
        found[name.upper()] = drift(*zip(*pairs, strict=True)) if pairs else None
    words = [
        f"{name} {'grows' if change > 0 else 'falls'} by {abs(change):.0%}" for name, change in found.items() if change
    ]
    return f"{', '.join(words)} over the window" if words else None
