"""How many requests a server answers within limits, and the largest rate at which it answers nearly all."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quantmill.metrics import bootstrap
from quantmill.metrics.serving import Timeline

BRACKET = 0.05  # relative width at which the search for the largest rate ends
GOOD = 0.99  # share of requests that must meet the limits


def slo_attainment(timelines: Sequence[Timeline], ttft: float, tpot: float) -> tuple[int, int]:
    """How many requests met both limits (seconds), and how many arrived: rejected, failed and unfinished ones miss."""
    met = sum(
        each.outcome == "ok" and each.ttft is not None and each.ttft <= ttft and (each.tpot or 0.0) <= tpot
        for each in timelines
    )
    return met, len(timelines)


def clopper_pearson(met: int, number: int) -> tuple[float, float]:
    """The exact 95% interval of a share (Clopper and Pearson 1934).

    Requests that wait in one queue are not independent, so that the truth may be a little wider.
    """
    tail = (1 - bootstrap.CONFIDENCE) / 2
    low = 0.0 if met == 0 else _solve(lambda share: 1 - _at_most(met - 1, number, share) - tail)
    high = 1.0 if met == number else _solve(lambda share: tail - _at_most(met, number, share))
    return low, high


def _at_most(most: int, number: int, share: float) -> float:
    """Probability that a binomial variable is at most `most`."""
    ways = np.concatenate(([0.0], np.cumsum(np.log(np.arange(number, number - most, -1) / np.arange(1, most + 1)))))
    counts = np.arange(most + 1)
    return float(np.exp(ways + counts * math.log(share) + (number - counts) * math.log1p(-share)).sum())


def _solve(grows: Callable[[float], float]) -> float:
    """Where a growing function of a share is 0."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if grows(middle) < 0 else (low, middle)
    return (low + high) / 2


class Trial(NamedTuple):
    """What was measured at one rate: requests that met the limits, of those that arrived, and the share's interval."""

    rate: float
    met: int
    arrived: int
    low: float
    high: float


class Goodput(NamedTuple):
    """The largest rate that was tried at which the share met the limits, and the smallest above it at which it did not;
    None where there is none.

    Arrivals are a sample, so that the truth may lie outside of that bracket: `proven` is the largest rate whose share
    is at least `GOOD` by the lower end of its interval, `refuted` the smallest whose share is less by the upper one.
    """

    rate: float | None
    above: float | None
    proven: float | None
    refuted: float | None
    trials: list[Trial]


def goodput(measure: Callable[[float], tuple[int, int]], start: float, tries: int = 24) -> Goodput:
    """The largest rate at which `GOOD` of the requests meet the limits: doubled or halved from `start` until one rate
    meets them and one does not, then by bisection until they are less than `BRACKET` apart.

    Args:
        measure: runs a load at a rate (requests a second): requests that met the limits, and that arrived.
        tries: at most so many loads.
    """
    trials: list[Trial] = []
    low, high, rate = 0.0, math.inf, start
    while len(trials) < tries and high > low * (1 + BRACKET):
        met, arrived = measure(rate)
        trials.append(Trial(rate, met, arrived, *clopper_pearson(met, arrived)))
        if met >= GOOD * arrived:
            low = rate
        else:
            high = rate
        rate = low * 2 if high == math.inf else high / 2 if low == 0 else math.sqrt(low * high)
    proven = max((each.rate for each in trials if each.low >= GOOD), default=None)
    refuted = min((each.rate for each in trials if each.high < GOOD), default=None)
    return Goodput(low or None, high if high < math.inf else None, proven, refuted, trials)
