"""Figures of a server under load, from the arrival times of tokens in seconds; figures' names end in their unit.

TTFT and e2e latency count from the scheduled time of a request, so that a client that waits for a slow server does not
hide its slowness (coordinated omission). TPOT = (last - first) / (tokens - tokens in the first event).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

P99_REQUESTS = 500  # with fewer, p99 is one of the worst five
WINDOW_SECONDS = 60.0
WINDOW_REQUESTS = 20  # per slot, if the window is shorter than that
LEVELS = [0.01, 0.05, *(round(0.1 * tenth, 1) for tenth in range(1, 10)), 0.95, 0.99]  # quantiles of distributions
BLOCKS = 10  # blocks of time by which a window is resampled

Outcome = Literal["ok", "failed", "rejected", "unfinished"]


@dataclass(frozen=True)
class Timeline:
    """The times of one request, in seconds.

    Attributes:
        intended, sent, end: when it was scheduled, was sent, and was completely answered or failed.
        times, tokens: the arrival of each event with tokens, and their number.
    """

    number: int
    intended: float
    sent: float | None
    end: float
    times: tuple[float, ...]
    tokens: tuple[float, ...]
    outcome: Outcome = "ok"

    @property
    def ttft(self) -> float | None:
        """Seconds from the scheduled time to the first token."""
        return self.times[0] - self.intended if self.times else None

    @property
    def ttft_sent(self) -> float | None:
        """Seconds from sending to the first token, as most tools count."""
        return self.times[0] - self.sent if self.times and self.sent is not None else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first event; None if all came at once."""
        rest = sum(self.tokens[1:])
        return (self.times[-1] - self.times[0]) / rest if rest else None

    @property
    def e2e(self) -> float:
        """Seconds from the scheduled time to the end."""
        return self.end - self.intended

    @property
    def longest_gap(self) -> float | None:
        """Seconds of the longest gap between two events with tokens."""
        return max((later - earlier for earlier, later in pairwise(self.times)), default=None)


class Window(NamedTuple):
    """The part of a load that counts, from `start` to `end`. `short`: the reason why it is too short, or None."""

    start: float
    end: float
    short: str | None

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end - self.start


def window(timelines: Sequence[Timeline], concurrency: int | None = None) -> Window:
    """Return the window from the moment when the load's number of requests is in flight to the last scheduled request.

    That number is `concurrency`, or the load's mean if None. With `concurrency`, the first request of each slot is
    excluded too, because it is not part of a steady load. Answers after the last arrival are the drain.
    """
    arrivals = sorted(each.intended for each in timelines)
    end = arrivals[-1]
    if concurrency and len(timelines) > 2 * concurrency:
        first = sorted(timelines, key=lambda each: each.intended)[:concurrency]
        start = min(end, max(each.end for each in first))
    else:
        if concurrency is None:
            spent = sum(min(each.end, end) - each.intended for each in timelines)
            concurrency = max(1, math.floor(spent / (end - arrivals[0]))) if end > arrivals[0] else 1
        start = min(end, _first_time_of(timelines, min(concurrency, len(timelines))))
    answered = sum(start <= each.end <= end for each in timelines)
    short = None
    if end - start < WINDOW_SECONDS and answered < WINDOW_REQUESTS * concurrency:
        short = (
            f"{end - start:.1f} s and {answered} requests at {concurrency} in flight: too short, of "
            f"{WINDOW_SECONDS:g} s or {WINDOW_REQUESTS} requests a slot"
        )
    return Window(start, end, short)


def burst(timelines: Sequence[Timeline]) -> bool:
    """Return whether all requests were scheduled at once, so that there is no steady load."""
    return len({each.intended for each in timelines}) == 1


def windows(runs: Sequence[Sequence[Timeline]], concurrency: int | None = None) -> list[Window]:
    """Return the window of each restart; a burst counts completely, to its end."""
    spans = [window(run, concurrency) for run in runs]
    return [
        Window(span.start, max(each.end for each in run), None) if burst(run) else span
        for run, span in zip(runs, spans, strict=True)
    ]


def answered_within(runs: Sequence[Sequence[Timeline]], spans: Sequence[Window]) -> list[Timeline]:
    """Return the requests that count for latency: answered, and scheduled in the window."""
    return [
        each
        for run, span in zip(runs, spans, strict=True)
        for each in run
        if each.outcome == "ok" and span.start <= each.intended <= span.end
    ]


def _first_time_of(timelines: Sequence[Timeline], number: int) -> float:
    """Return the first time at which `number` requests were in flight, or infinity."""
    changes = sorted([(each.intended, 1) for each in timelines] + [(each.end, -1) for each in timelines])
    flight = 0
    for time, change in changes:
        flight += change
        if flight >= number:
            return time
    return math.inf


def tokens_between(timelines: Sequence[Timeline], edges: np.ndarray) -> np.ndarray:
    """Return the tokens [n - 1] between n edges; those at an edge belong to the span before it."""
    times = np.array([time for each in timelines for time in each.times])
    tokens = np.array([count for each in timelines for count in each.tokens], dtype=np.float64)
    spans = np.searchsorted(edges, times, side="left") - 1
    inside = (spans >= 0) & (spans < len(edges) - 1)
    return np.bincount(spans[inside], weights=tokens[inside], minlength=len(edges) - 1)


class Reads(NamedTuple):
    """Lower bound of the bytes per second that decoding reads."""

    weights: float
    keys: float  # and values, of the cache


def reads(
    tokens_per_second: float, users: int, tokens_a_step: float, context: float, weights: float, keys: float
) -> Reads:
    """Compute the bytes that a server reads for `users` at once: in each step the weights once, and each user's cache.

    Args:
        tokens_per_second: of all users together.
        tokens_a_step: new tokens per user and step; more than one with speculation.
        context: mean tokens in a user's cache.
        weights: bytes of weights that a step reads. keys: bytes of the KV cache per token.
    """
    steps = tokens_per_second / tokens_a_step
    return Reads(steps / users * weights, steps * context * keys)


class Figures(NamedTuple):
    """Figures of a load by name, and the reason for each missing one."""

    values: dict[str, float]
    missing: dict[str, str]


def summary(runs: Sequence[Sequence[Timeline]], concurrency: int | None = None) -> Figures:
    """Summarise one load over all restarts of a server.

    Latencies are those of answered requests that were scheduled in the window; rates count arrivals of tokens and ends
    of requests in it. A burst counts completely. Counts are sums over restarts; `makespan_s` is a median.
    """
    spans = windows(runs, concurrency)
    good = [[each for each in run if each.outcome == "ok"] for run in runs]
    makespans = [max(each.end for each in run) - run[0].intended for run in runs]
    every = [each for run in runs for each in run]
    values: dict[str, float] = {"requests": len(every), "makespan_s": float(np.median(makespans))}
    values |= {name: sum(each.outcome == name for each in every) for name in ("failed", "rejected", "unfinished")}
    missing = {}
    answered = sum(span.start < each.end <= span.end for run, span in zip(good, spans, strict=True) for each in run)
    edges = [np.array([span.start, span.end]) for span in spans]
    tokens = float(sum(tokens_between(run, each)[0] for run, each in zip(runs, edges, strict=True)))
    seconds = sum(span.seconds for span in spans)
    short = next((span.short for span in spans if span.short), None)
    for name, count in (("output_tokens_per_second", tokens), ("requests_per_second", answered)):
        if short:
            missing[name] = short
        else:
            values[name] = count / seconds
    for name, known in samples(answered_within(runs, spans)).items():
        for percent in (50, 90, 99):
            if not known:
                missing[f"{name}_p{percent}"] = "no request gave one"
            elif percent == 99 and len(known) < P99_REQUESTS:
                missing[f"{name}_p99"] = f"{len(known)} requests; p99 needs {P99_REQUESTS}"
            else:
                values[f"{name}_p{percent}"] = float(np.percentile(known, percent))
    return Figures(values, missing)


def samples(timelines: Sequence[Timeline]) -> dict[str, list[float]]:
    """Return the milliseconds of all requests by figure, without missing ones."""
    values: dict[str, list[float | None]] = {
        "ttft_ms": [each.ttft for each in timelines],
        "ttft_sent_ms": [each.ttft_sent for each in timelines],
        "tpot_ms": [each.tpot for each in timelines],
        "itl_ms_max": [each.longest_gap for each in timelines],
        "e2e_ms": [each.e2e for each in timelines],
    }
    return {name: [each * 1000 for each in found if each is not None] for name, found in values.items()}
