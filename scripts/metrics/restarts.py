"""Intervals of a server's figures. Restarts of the server are the samples; within each, blocks of time are."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from metrics import bootstrap
from metrics.serving import BLOCKS, Timeline, tokens_between, window

RESAMPLES = 2_000


class Ratio(NamedTuple):
    """A figure's value or ratio, and its 95% interval; None where too little is known for one."""

    value: float
    low: float | None
    high: float | None


def resamples(restarts: int, blocks: int, seed: int = 0) -> np.ndarray:
    """How often each block of each restart is drawn [RESAMPLES, restarts, blocks]: restarts with replacement, then the
    blocks of each drawn one. What one start of a server has in common is one sample, however long it ran."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(restarts, np.full(restarts, 1 / restarts), size=RESAMPLES)
    return rng.multinomial(drawn * blocks, np.full(blocks, 1 / blocks))


def _interval(replicates: np.ndarray, restarts: int, blocks: int) -> tuple[float, float]:
    return bootstrap.interval(replicates, restarts if restarts > 1 else blocks)


def throughput(runs: Sequence[Sequence[Timeline]], concurrency: int | None = None) -> Ratio:
    """Output tokens a second of all restarts of a server under the same load, and the interval."""
    tokens, seconds = _blocks(runs, concurrency)
    counts = resamples(*tokens.shape)
    replicates = np.einsum("rsb,sb->r", counts, tokens) / np.einsum("rsb,sb->r", counts, seconds)
    return Ratio(float(tokens.sum() / seconds.sum()), *_interval(replicates, *tokens.shape))


def _blocks(runs: Sequence[Sequence[Timeline]], concurrency: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds [restarts, BLOCKS] of each block of each window."""
    tokens, seconds = [], []
    for run in runs:
        span = window(run, concurrency)
        edges = np.linspace(span.start, span.end, BLOCKS + 1)
        tokens.append(tokens_between(run, edges))
        seconds.append(np.diff(edges))
    return np.array(tokens), np.array(seconds)


def compare(
    a: Sequence[Sequence[Timeline]], b: Sequence[Sequence[Timeline]], concurrency: int | None = None
) -> dict[str, Ratio]:
    """Two servers under the same loads: b's figure over a's, for output tokens a second and the means of TTFT, TPOT and
    e2e of the requests that both answered.

    Both are resampled alike, restart by restart and block by block, so that what makes a request or a moment of the
    schedule hard for both cancels. Raises ValueError where the loads are not the same ones.
    """
    if [len(run) for run in a] != [len(run) for run in b]:
        raise ValueError("two servers had other loads: there is nothing to compare")
    ta, sa = _blocks(a, concurrency)
    tb, sb = _blocks(b, concurrency)
    counts = resamples(*ta.shape)
    total = [np.einsum("rsb,sb->r", counts, each) for each in (ta, sa, tb, sb)]
    value = tb.sum() / sb.sum() / (ta.sum() / sa.sum())
    replicates = total[2] / total[3] / (total[0] / total[1])
    found = {"output_tokens_per_second": Ratio(float(value), *_interval(replicates, *ta.shape))}
    for name in ("ttft", "tpot", "e2e"):
        sums = np.zeros((2, *ta.shape))
        for restart, (left, right) in enumerate(zip(a, b, strict=True)):
            for place, (mine, other) in enumerate(zip(left, right, strict=True)):
                values = getattr(mine, name), getattr(other, name)
                if mine.outcome == other.outcome == "ok" and None not in values:
                    sums[:, restart, place * BLOCKS // len(left)] += values
        if sums.all():
            drawn = np.einsum("rsb,psb->pr", counts, sums)
            value = sums[1].sum() / sums[0].sum()
            found[name] = Ratio(float(value), *_interval(drawn[1] / drawn[0], *ta.shape))
    return found
