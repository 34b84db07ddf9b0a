"""SLO attainment, the share of requests within the limits, and goodput, the largest rate at which nearly all are."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quantmill.metrics import bootstrap
from quantmill.metrics.serving import Timeline

BRACKET = 0.05  # relative width at which the search for goodput ends
GOOD = 0.99  # share of requests that must meet the limits


def slo_attainment(timelines: Sequence[Timeline], ttft: float, tpot: float) -> tuple[int, int]:
    """Count requests that met both limits (seconds), and all arrivals; rejected, failed and unfinished ones miss."""
    met = sum(
        each.outcome == "ok" and each.ttft is not None and each.ttft <= ttft and (each.tpot or 0.0) <= tpot
        for each in timelines
    )
    return met, len(timelines)


def clopper_pearson(met: int, number: int) -> tuple[float, float]:
    """Return the exact 95% interval of a share (Clopper and Pearson 1934).

    Requests in one queue are not independent, so that the true interval may be slightly wider.
    """
    tail = (1 - bootstrap.CONFIDENCE) / 2
    low = 0.0 if met == 0 else _solve(lambda share: 1 - _at_most(met - 1, number, share) - tail)
    high = 1.0 if met == number else _solve(lambda share: tail - _at_most(met, number, share))
    return low, high


def _at_most(most: int, number: int, share: float) -> float:
    """Return the probability that a binomial variable is at most `most`."""
    ways = np.concatenate(([0.0], np.cumsum(np.log(np.arange(number, number - most, -1) / np.arange(1, most + 1)))))
    counts = np.arange(most + 1)
    return float(np.exp(ways + counts * math.log(share) + (number - counts) * math.log1p(-share)).sum())


def _solve(grows: Callable[[float], float]) -> float:
    """Return the root of an increasing function of a share."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if grows(middle) < 0 else (low, middle)
    return (low + high) / 2


class Trial(NamedTuple):
    """The result at one rate: requests that met the limits, arrivals, and the interval of their share."""

    rate: float
    met: int
    arrived: int
    low: float
    high: float


class Goodput(NamedTuple):
    """The largest tried rate that met the limits, and the smallest one above it that did not; None if there is none.

    Arrivals are a sample, so the truth may lie outside that bracket. `proven` is the largest rate whose interval lies
    at or above `GOOD`, `refuted` the smallest rate whose interval lies below.
    """

    rate: float | None
    above: float | None
    proven: float | None
    refuted: float | None
    trials: list[Trial]


def goodput(measure: Callable[[float], tuple[int, int]], start: float, tries: int = 24) -> Goodput:
    """Search the largest rate at which a share of `GOOD` of the requests meets the limits.

    The rate is doubled or halved from `start` until one rate meets them and one does not, then bisected until the two
    differ by less than `BRACKET`.

    Args:
        measure: runs a load at a rate (requests per second); returns requests that met the limits, and arrivals.
        tries: the maximum number of loads.
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
