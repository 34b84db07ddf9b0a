"""Check that server, client and host worked evenly during a load, which a figure cannot show by itself."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median

import numpy as np

from quantmill.client.checks import Finding
from quantmill.client.client import Recording
from quantmill.metrics.serving import Timeline, window
from quantmill.metrics.steadiness import instability

MAX_CPU = 0.5  # of a core, for the client
MAX_OF_CEILING = 0.5  # of the client's ceiling, in events per second
MAX_LAG = 0.001  # seconds, p99
MAX_LAG_OF_TPOT = 0.05
MAX_STALLED = 0.01  # of the load; a client's loop that stalls longer moves the p99 of the gaps
MAX_CLOCK_STEP = 0.1  # seconds, beyond a thousandth of the load: clocks are slewed
LONG_GAP = 1.0  # seconds, of a stalled server
MUCH = 10  # times the 90th percentile of the gaps
FIRST = 3  # times the longest later gap at the same batch size
WORTH = 0.05  # seconds by which a first step must be longer


def check_load(timelines: Sequence[Timeline], concurrency: int | None = None) -> list[Finding]:
    """Check that the server neither stalled nor became slower. `concurrency`: requests in flight, None for a rate."""
    good = [each for each in timelines if each.outcome == "ok" and len(each.times) > 1]
    if not good:
        return []
    found = []
    if concurrency and concurrency > 1 and len(good) > 2 and _most_together(good) == 1:
        message = f"the server answered one request at a time while {concurrency} were in flight"
        found.append(Finding("serial", message))
    size = _cliff(good)
    if size:
        message = f"the first step of {size[0]} requests together took {size[1]:.2f} s: warm up with every batch size"
        found.append(Finding("cliff", message))
    elif stall := _stall(good):
        begin = min(each.intended for each in timelines)
        message = f"the server stalled for {stall[1]:.1f} s, {stall[0] - begin:.1f} s after the start"
        found.append(Finding("stall", message))
    span = window(timelines, concurrency)
    reason = instability(timelines, span) if span.seconds > 0 and not found else None
    if reason:
        found.append(Finding("unstable", f"the load is not steady: {reason}", refuses=False))
    return found


def _most_together(good: Sequence[Timeline]) -> int:
    """Return the most requests that were between their first and last token at one time."""
    changes = sorted([(each.times[0], 1) for each in good] + [(each.times[-1], -1) for each in good])
    return max(accumulate(change for _, change in changes))


def _stall(good: Sequence[Timeline]) -> tuple[float, float] | None:
    """Return the start and length of a gap that is far longer than usual.

    A server may prefill other requests' prompts in a gap. Each of them is allowed the time of the load's quickest first
    token.
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
    """Return a batch size whose first step took far longer than all later steps of that size, and its seconds.

    Steps that end with the first token of another request do not count, because its prompt was prefilled in them. A
    server that gets 64 requests at once prefills most of them in one long step of the first few. The tokens of a step
    arrive within the time of a usual step.
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
        begin, gap = min(found)  # of its first step, in which the whole batch waited
        together = [start == begin or start < begin + gap for start, _ in found]
        first = max(gap for (_, gap), inside in zip(found, together, strict=True) if inside)
        later = [gap for (_, gap), inside in zip(found, together, strict=True) if not inside]
        if len(later) >= MUCH and first > FIRST * max(later) and first > max(later) + WORTH:
            return size, first
    return None


def check_client(
    recording: Recording, timelines: Sequence[Timeline], ceiling: float | None, scheduled: bool
) -> list[Finding]:
    """Check that the client was fast enough for its times to be the server's.

    Args:
        ceiling: events per second and core that the client can take on this machine (loads.client_ceiling).
        scheduled: whether requests had times at which to be sent.
    """
    found = []
    cpu = recording.cpu_seconds / recording.seconds
    if cpu > MAX_CPU:
        found.append(Finding("client_cpu", f"the client took {cpu:.0%} of a core, of at most {MAX_CPU:.0%}"))
    rate = recording.arrivals / recording.seconds
    if ceiling and rate > MAX_OF_CEILING * ceiling:
        message = f"{rate:,.0f} events/s came, more than half of the {ceiling:,.0f} that the client can take"
        found.append(Finding("client_ceiling", message))
    stalled = recording.stall_seconds / recording.seconds
    if stalled > MAX_STALLED:
        message = f"{recording.longest_stall * 1000:.0f} ms at once, {stalled:.0%} of the time"
        found.append(Finding("slow_reader", f"the client stalled for {message}: give it a core of its own"))
    elif scheduled and recording.lags:
        lag = float(np.percentile(recording.lags, 99))
        tpots = [each.tpot for each in timelines if each.tpot]
        limit = min([MAX_LAG, *([MAX_LAG_OF_TPOT * median(tpots)] if tpots else [])])
        if lag > limit:
            late = f"{lag * 1000:.2f} ms late (p99), of at most {limit * 1000:.2f}"
            message = f"requests were sent up to {late}: the client lags"
            found.append(Finding("schedule_lag", message))
    if abs(recording.clock_step) > MAX_CLOCK_STEP + recording.seconds / 1000:
        message = f"the host's clock was set by {recording.clock_step:+.1f} s meanwhile; no figure depends on it"
        found.append(Finding("clock_step", message, refuses=False))
    return found


def check_artifact(before: Mapping[str, object], after: Mapping[str, object]) -> list[Finding]:
    """Check that the artifact's files are still those that were loaded, by their fingerprints."""
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if not changed:
        return []
    message = f"the artifact was changed after the server's start: {', '.join(changed)}; start the server again"
    return [Finding("artifact_changed", message)]
