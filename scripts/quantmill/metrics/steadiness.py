"""Whether a measurement was steady: a queue that grows, or a host that becomes slower, has no figure that holds."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from quantmill.metrics import bootstrap
from quantmill.metrics.serving import BLOCKS, Timeline, Window, tokens_between

DRIFT = 0.1  # of the mean, by which a figure may change over the window
SLOWER = 1.25  # times as slow as the rest, from which on a part of a measurement counts
PIECES = 32  # of a measurement, of which such a part consists
SHUFFLES, CHANCE = 199, 0.01  # of the pieces, and how many of them may look as uneven


class Part(NamedTuple):
    """A part of a measurement that took so many `times` as long as the rest; it begins and ends at shares of the
    values. Where most was slow it is the part that was quick, and `times` is below 1."""

    begin: float
    end: float
    times: float

    def __str__(self) -> str:
        begin, end, times, words = *self, "slower"
        if times < 1:
            times, words = 1 / times, "faster"
            if begin == 0 or end == 1:  # the rest is in one piece too, and is the slow one
                begin, end, words = (end, 1.0, "slower") if begin == 0 else (0.0, begin, "slower")
        return f"from {begin:.0%} to {end:.0%} of its runs it was {times:.2f} times {words} than in the rest"


def uneven_part(values: Sequence[float]) -> Part | None:
    """The part of a measurement that differs most from the rest; None where it is less than `SLOWER` or may be chance.

    Circular binary segmentation, its first step (Olshen, Venkatraman, Lucito and Wigler, Biostatistics 5, 2004): of all
    parts that are in one piece the one whose mean lies furthest from the rest's, in standard errors. That it is no
    accident is found by shuffling: values that differ, but not in the order of time, look as uneven shuffled.

    Args:
        values: [n] logarithms of times, in the order of time, without what is known to make them differ.
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
        """Of the deviations in each part [..., parts]."""
        whole = np.pad(
            np.cumsum(rows - rows.mean(axis=-1, keepdims=True), axis=-1), [(0, 0)] * (rows.ndim - 1) + [(1, 0)]
        )
        return whole[..., ends] - whole[..., starts]

    errors = np.sqrt(sizes * (1 - sizes / count))
    found = sums(pieces)
    place = int(np.argmax(np.abs(found) / errors))
    change = float(found[place] / errors[place] ** 2)  # of the part's mean, against that of the rest
    if abs(change) < math.log(SLOWER):
        return None
    shuffled = np.random.default_rng(0).permuted(np.tile(pieces, (SHUFFLES, 1)), axis=1)
    most = (np.abs(sums(shuffled)) / errors).max(axis=1)
    as_uneven = int((most >= np.abs(found[place]) / errors[place] - 1e-9).sum())
    if (1 + as_uneven) / (1 + SHUFFLES) > CHANCE:
        return None
    begin, end = (float(edges[each[place]] / len(values)) for each in (starts, ends))
    return Part(begin, end, math.exp(change))


def drift(times: ArrayLike, values: ArrayLike) -> float | None:
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


def uneven_tokens(runs: Sequence[Sequence[Timeline]], spans: Sequence[Window]) -> Part | None:
    """The part of a load at which tokens came most slowly, of all starts of a server one after the other; for loads
    that keep a number of requests in flight: elsewhere the arrivals decide how many tokens come."""
    seconds: list[float] = []
    for run, span in zip(runs, spans, strict=True):
        edges = np.linspace(span.start, span.end, PIECES + 1)
        tokens = np.maximum(tokens_between(run, edges), 0.5)  # of a span without any, at most one was on its way
        seconds += np.log(np.diff(edges) / tokens).tolist()
    return uneven_part(seconds)
