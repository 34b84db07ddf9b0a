"""Intervals of a server's figures. The samples are restarts of the server, and blocks of time within each."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from quantmill.metrics import bootstrap
from quantmill.metrics.serving import BLOCKS, Timeline, burst, tokens_between, window

RESAMPLES = 2_000


class Ratio(NamedTuple):
    """A figure's value, or the ratio of two, and its 95% interval, which is None for a single sample."""

    value: float
    low: float | None
    high: float | None


def resamples(restarts: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Draw restarts with replacement, then blocks of each; return counts [RESAMPLES, restarts, blocks].

    One start of a server is one sample, however long it ran.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(restarts, np.full(restarts, 1 / restarts), size=RESAMPLES)
    return rng.multinomial(drawn * blocks, np.full(blocks, 1 / blocks))


def _ratio(value: float, replicates: np.ndarray, restarts: int, blocks: int) -> Ratio:
    """Return the value with the central 95% of its replicates, widened in logarithms by Student's t.

    Replicates of three restarts never leave the range of the three, which contains the truth three times in four. So
    outer percentiles do not help, unlike in metrics.bootstrap, which has at least five samples.
    """
    samples = restarts if restarts > 1 else blocks
    if samples < 2 or not (replicates > 0).all():
        return Ratio(value, None, None)
    normal = NormalDist().inv_cdf((1 + bootstrap.CONFIDENCE) / 2)
    stretch = math.sqrt(samples / (samples - 1)) * bootstrap.student_t(samples - 1) / normal
    low, high = bootstrap.interval(np.log(replicates / value))
    return Ratio(value, value * math.exp(low * stretch), value * math.exp(high * stretch))


def throughput(runs: Sequence[Sequence[Timeline]], concurrency: int | None = None) -> Ratio:
    """Return output tokens per second of all restarts of a server under the same load, with the interval.

    No window may be empty, as when `serving.summary` has the figure.
    """
    tokens, seconds = _blocks(runs, concurrency)
    counts = resamples(*tokens.shape)
    replicates = np.einsum("rsb,sb->r", counts, tokens) / np.einsum("rsb,sb->r", counts, seconds)
    return _ratio(float(tokens.sum() / seconds.sum()), replicates, *tokens.shape)


def _blocks(runs: Sequence[Sequence[Timeline]], concurrency: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and seconds [restarts, blocks] of each window; a burst is one block, to its end."""
    tokens, seconds = [], []
    for run in runs:
        span = window(run, concurrency)
        edges = np.linspace(span.start, span.end, BLOCKS + 1)
        if burst(run):
            edges = np.array([span.start, max(each.end for each in run)])
        tokens.append(tokens_between(run, edges))
        seconds.append(np.diff(edges))
    return np.array(tokens), np.array(seconds)


def compare(
    a: Sequence[Sequence[Timeline]], b: Sequence[Sequence[Timeline]], concurrency: int | None = None
) -> dict[str, Ratio]:
    """Return b's figures over a's: output tokens per second, and mean TTFT, TPOT and e2e of requests both answered.

    Both are resampled alike by restart and block, so that the difficulty of a request or a moment of the schedule
    cancels. Raises ValueError if the loads differ.
    """
    if [len(run) for run in a] != [len(run) for run in b]:
        raise ValueError("the two servers' loads differ and cannot be compared")
    mine, theirs = _blocks(a, concurrency), _blocks(b, concurrency)
    shape = mine[0].shape
    counts = resamples(*shape)
    found = {}
    if mine[0].sum():
        total = [np.einsum("rsb,sb->r", counts, each) for each in (*mine, *theirs)]
        value = theirs[0].sum() / theirs[1].sum() / (mine[0].sum() / mine[1].sum())
        replicates = total[2] / total[3] / (total[0] / total[1])
        found["output_tokens_per_second"] = _ratio(float(value), replicates, *shape)
    for name in ("ttft", "tpot", "e2e"):
        sums = np.zeros((2, *shape))
        for restart, (left, right) in enumerate(zip(a, b, strict=True)):
            for place, (one, other) in enumerate(zip(left, right, strict=True)):
                values = getattr(one, name), getattr(other, name)
                if one.outcome == other.outcome == "ok" and None not in values:
                    sums[:, restart, place * shape[1] // len(left)] += values
        if sums.sum(axis=(1, 2)).all():
            drawn = np.einsum("rsb,psb->pr", counts, sums)
            with np.errstate(invalid="ignore"):  # a restart that answered nothing
                found[name] = _ratio(float(sums[1].sum() / sums[0].sum()), drawn[1] / drawn[0], *shape)
    return found
