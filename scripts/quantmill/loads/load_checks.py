"""Whether server, client and host worked evenly while a load ran: what a figure cannot show by itself."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from quantmill.client.checks import Finding
from quantmill.client.client import Recording
from quantmill.metrics.serving import Timeline, window
from quantmill.metrics.steadiness import instability

MAX_CPU = 0.5  # of a core, for the client
MAX_OF_CEILING = 0.5  # events a second, of those that the client can take
MAX_LAG = 0.001  # seconds, p99
MAX_LAG_OF_TPOT = 0.05
MAX_STALLED = 0.01  # of the load, for which the client's loop stood still: more moves p99 of the gaps
MAX_CLOCK_STEP = 0.1  # seconds, beyond a thousandth of the load: clocks are slewed
LONG_GAP = 1.0  # seconds, of a server that stands still
MUCH = 10  # times the gap below which nine in ten lie
FIRST = 3  # times the longest later gap at the same batch size
WORTH = 0.05  # seconds by which a first step must be longer


def check_load(timelines: Sequence[Timeline], concurrency: int | None = None) -> list[Finding]:
    """Whether the server worked evenly: nothing that stands still once, or becomes slower.

    Args:
        concurrency: requests that were kept in flight; None for a schedule.
    """
    good = [each for each in timelines if each.outcome == "ok" and len(each.times) > 1]
    if not good:
        return []
    found = []
    if concurrency and concurrency > 1 and len(good) > 2 and _most_together(good) == 1:
        message = f"the server answered one request at a time where {concurrency} were in flight"
        found.append(Finding("serial", message))
    size = _cliff(good)
    if size:
        message = f"the first step of {size[0]} requests together took {size[1]:.2f} s: warm up with every batch size"
        found.append(Finding("cliff", message))
    else:
        stall = _stall(good)
        if stall:
            begin = min(each.intended for each in timelines)
            message = f"the server stood still for {stall[1]:.1f} s, {stall[0] - begin:.1f} s after the start"
            found.append(Finding("stall", message))
    span = window(timelines, concurrency)
    reason = instability(timelines, span) if span.seconds > 0 and not found else None
    if reason:
        found.append(Finding("unstable", f"the load is not steady: {reason}", refuses=False))
    return found


def _most_together(good: Sequence[Timeline]) -> int:
    """The most requests that were between their first token and their last at one time."""
    changes = sorted([(each.times[0], 1) for each in good] + [(each.times[-1], -1) for each in good])
    together = most = 0
    for _, change in changes:
        together += change
        most = max(most, together)
    return most


def _stall(good: Sequence[Timeline]) -> tuple[float, float] | None:
    """When a request began to wait for its next token for far longer than usual, and how long.

    A server that reads other requests' prompts meanwhile is at work: it may take as long as the load's quickest first
    token for each that it read.
    """
    gaps = [(later - earlier, earlier) for each in good for earlier, later in pairwise(each.times)]
    usual = float(np.quantile([gap for gap, _ in gaps], 0.9))
    began = np.sort([each.times[0] for each in good])
    quickest = min(each.times[0] - each.intended for each in good)
    for gap, start in sorted(gaps, reverse=True):
        if gap <= max(LONG_GAP, MUCH * usual):
            break
        read = np.searchsorted(began, start + gap + usual, "right") - np.searchsorted(began, start, "right")
        if gap > read * quickest:
            return start, gap
    return None


def _cliff(good: Sequence[Timeline]) -> tuple[int, float] | None:
    """A batch size whose first step took far longer than any later one of it, and how long.

    Steps that end with the first token of another request do not count: its prompt was read in them, and a server
    that takes 64 requests at once reads most of their prompts in one long step of the few that were there first. What
    a step makes is written within a usual step's time.
    """
    began = np.sort([each.times[0] for each in good])
    ended = np.sort([each.times[-1] for each in good])
    step = float(np.median(np.concatenate([np.diff(each.times) for each in good])))
    steps: dict[int, list[tuple[float, float]]] = {}
    for each in good:
        starts, ends = np.array(each.times[:-1]), np.array(each.times[1:])
        sizes = np.searchsorted(began, starts, "right") - np.searchsorted(ended, starts, "right")
        begins = np.maximum(starts, ends - step)
        alone = np.searchsorted(began, begins, "right") == np.searchsorted(began, ends + step, "right")
        for size, start, gap in zip(
            sizes[alone].tolist(), starts[alone].tolist(), (ends - starts)[alone].tolist(), strict=True
        ):
            steps.setdefault(size, []).append((start, gap))
    for size, found in sorted(steps.items()):
        begin, gap = min(found)  # of its first step, in which all that were in the batch waited together
        together = [start == begin or start < begin + gap for start, _ in found]
        first = max(gap for (_, gap), inside in zip(found, together, strict=True) if inside)
        later = [gap for (_, gap), inside in zip(found, together, strict=True) if not inside]
        if len(later) >= MUCH and first > FIRST * max(later) and first > max(later) + WORTH:
            return size, first
    return None


def check_client(
    recording: Recording, timelines: Sequence[Timeline], ceiling: float | None, scheduled: bool
) -> list[Finding]:
    """Whether the client itself was too slow for its times to be the server's.

    Args:
        ceiling: events a second and core that the client can take on this machine (serving.ceiling).
        scheduled: whether requests had times at which they were to be sent.
    """
    found = []
    cpu = recording.cpu_seconds / recording.seconds
    if cpu > MAX_CPU:
        found.append(Finding("client_cpu", f"the client took {cpu:.0%} of a core, of at most {MAX_CPU:.0%}"))
    rate = recording.arrivals / recording.seconds
    if ceiling and rate > MAX_OF_CEILING * ceiling:
        message = f"{rate:,.0f} events a second came, more than half of the {ceiling:,.0f} that the client can take"
        found.append(Finding("client_ceiling", message))
    stalled = recording.stall_seconds / recording.seconds
    if stalled > MAX_STALLED:
        message = f"{recording.longest_stall * 1000:.0f} ms at once, {stalled:.0%} of the time"
        found.append(Finding("slow_reader", f"the client stood still for {message}: give it a core of its own"))
    elif scheduled and recording.lags:
        lag = float(np.percentile(recording.lags, 99))
        tpots = [each.tpot for each in timelines if each.tpot]
        limit = min([MAX_LAG, *([MAX_LAG_OF_TPOT * median(tpots)] if tpots else [])])
        if lag > limit:
            message = (
                f"requests were taken up {lag * 1000:.2f} ms late (p99), of at most {limit * 1000:.2f}: the client lags"
            )
            found.append(Finding("schedule_lag", message))
    if abs(recording.clock_step) > MAX_CLOCK_STEP + recording.seconds / 1000:
        message = f"the host's clock was set by {recording.clock_step:+.1f} s meanwhile; no figure is taken from it"
        found.append(Finding("clock_step", message, refuses=False))
    return found


def check_artifact(before: Mapping[str, object], after: Mapping[str, object]) -> list[Finding]:
    """Whether the artifact's files (of each what tells its content, by name) are those that were loaded."""
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if not changed:
        return []
    message = f"the artifact was changed after the server's start: {', '.join(changed)}; start the server again"
    return [Finding("artifact_changed", message)]
