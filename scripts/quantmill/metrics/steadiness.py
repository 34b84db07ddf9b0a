"""Detect unsteady measurements: a queue that grows, or a host that becomes slower."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from quantmill.metrics import bootstrap
from quantmill.metrics.serving import BLOCKS, Timeline, Window, tokens_between

DRIFT = 0.1  # share of the mean by which a figure may change over the window
SLOWER = 1.25  # factor to the rest from which on a slow part counts
PIECES = 32  # of a measurement; a slow part consists of whole pieces
SHUFFLES, CHANCE = 199, 0.01  # of the pieces, and the share of them that may look as uneven


class Part(NamedTuple):
    """A part of a measurement that took `times` as long as the rest; `begin` and `end` are shares of the values.

    If most of the measurement was slow, the part is the fast one, and `times` is below 1.
    """

    begin: float
    end: float
    times: float

    def __str__(self) -> str:
        begin, end, times, words = *self, "slower"
        if times < 1:
            times, words = 1 / times, "faster"
            if begin == 0 or end == 1:  # the rest is contiguous too, and is the slow part
                begin, end, words = (end, 1.0, "slower") if begin == 0 else (0.0, begin, "slower")
        return f"from {begin:.0%} to {end:.0%} of its runs it was {times:.2f} times {words} than in the rest"


def uneven_part(values: Sequence[float]) -> Part | None:
    """Return the part that differs most from the rest; None if it is below `SLOWER` or may be chance.

    This is the first step of circular binary segmentation (Olshen, Venkatraman, Lucito and Wigler, Biostatistics 5,
    2004): among all contiguous parts, the one whose mean is furthest from the rest's, in standard errors. Its
    significance is found by shuffling, since values that differ independently of time look as uneven when shuffled.

    Args:
        values: [n] logarithms of times, in order, without known differences.
    """
    count = min(len(values), PIECES)
    edges = np.linspace(0, len(values), count + 1).round().astype(int)
    pieces = np.array([np.mean(values[begin:end]) for begin, end in pairwise(edges)])
    starts, ends = np.triu_indices(count + 1, 1)
    starts, ends = (each[ends - starts < count] for each in (starts, ends))
    if not len(starts):
        return None
    sizes = ends - starts

    def sums(rows: np.ndarray) -> np.ndarray:
        """Return the sum of deviations from the mean in each part [parts, ...] of rows [..., pieces]."""
        whole = np.zeros((rows.shape[-1] + 1, *rows.shape[:-1]))
        whole[1:] = np.cumsum(rows - rows.mean(axis=-1, keepdims=True), axis=-1).T
        return whole[ends] - whole[starts]

    errors = np.sqrt(sizes * (1 - sizes / count))
    found = sums(pieces)
    place = int(np.argmax(np.abs(found) / errors))
    change = float(found[place] / errors[place] ** 2)  # of the part's mean, relative to that of the rest
    if abs(change) < math.log(SLOWER):
        return None
    shuffled = np.random.default_rng(0).permuted(np.tile(pieces, (SHUFFLES, 1)), axis=1)
    most = (np.abs(sums(shuffled)) / errors[:, None]).max(axis=0)
    as_uneven = int((most >= np.abs(found[place]) / errors[place] - 1e-9).sum())
    if (1 + as_uneven) / (1 + SHUFFLES) > CHANCE:
        return None
    begin, end = (float(edges[each[place]] / len(values)) for each in (starts, ends))
    return Part(begin, end, math.exp(change))


def drift(times: ArrayLike, values: ArrayLike) -> float | None:
    """Return a figure's change over time as a share of its mean, if it exceeds `DRIFT` and is significant; else None.

    It is the slope of a line through the means of `BLOCKS` blocks, tested by Student's t at 95%. None also if there are
    fewer values than blocks.
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
    """Return the number of requests in flight at each time."""
    began = np.sort([each.intended for each in timelines])
    ended = np.sort([each.end for each in timelines])
    return np.searchsorted(began, times, "right") - np.searchsorted(ended, times, "right")


def instability(timelines: Sequence[Timeline], span: Window) -> str | None:
    """Describe the drift of TTFT, TPOT or the queue in this window, in words; None if the load is steady."""
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


def uneven_tokens(runs: Sequence[Sequence[Timeline]], spans: Sequence[Window]) -> Part | None:
    """Return the part of a load at which tokens came most slowly, over all starts of a server in sequence.

    Only for loads with constant concurrency: in others, arrivals decide the number of tokens.
    """
    seconds: list[float] = []
    for run, span in zip(runs, spans, strict=True):
        edges = np.linspace(span.start, span.end, PIECES + 1)
        tokens = np.maximum(tokens_between(run, edges), 0.5)  # a span without tokens has at most one under way
        seconds += np.log(np.diff(edges) / tokens).tolist()
    return uneven_part(seconds)
