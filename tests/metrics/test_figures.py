"""Figures of a load on simulated time, held against what the fake server computed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_model import VOCAB, Model
from fake_server import Server
from timeline import Engine, Job
from virtual import Loop, send

from quantmill.client import stream
from quantmill.client.checks import Counters, LoadRequest
from quantmill.client.client import Recording
from quantmill.client.dialects import DIALECTS
from quantmill.client.schedule import Closed, Load, Open, Poisson, burst
from quantmill.client.target import Target
from quantmill.loads import result
from quantmill.loads.plan import PlannedLoad
from quantmill.loads.server_start import LoadResult
from quantmill.metrics import serving

COMPLETIONS = DIALECTS["completions"]
PROMPT, NEW = 40, 20
A, B, C, D = 0.02, 0.0001, 0.004, 0.0005


def prompt(place: int) -> list[int]:
    return [2 + (place * 7 + k * k) % (VOCAB - 2) for k in range(PROMPT)]


def run(
    load: Load, number: int, faults: tuple[str, ...] = (), dialect: str = "completions", **engine: Any
) -> tuple[list[serving.Timeline], list[Job], Recording, list[stream.Reply]]:
    """Return requests of 40 tokens, with 20 new ones each."""
    loop = Loop()
    server = Server(Engine(loop, **engine), faults)
    target, kind = Target("http://fake"), DIALECTS[dialect]
    bodies = [target.request(kind.path, kind.body("fake", prompt(place), NEW, True)) for place in range(number)]
    recording = send(loop, server, bodies, load)
    replies = [stream.read(exchange, kind) for exchange in recording.exchanges]
    loop.close()
    return [stream.timeline(reply) for reply in replies], server.engine.jobs, recording, replies


@pytest.mark.parametrize("dialect", ["completions", "llama"])
def test_a_closed_loop_has_the_servers_own_times(dialect: str) -> None:
    timelines, jobs, recording, replies = run(Closed(4), 100, dialect=dialect)
    figures = serving.summary([timelines], 4).values
    ttft, tpot = A + B * PROMPT, C + D * 4
    assert figures["ttft_ms_p50"] == pytest.approx(ttft * 1000, rel=0.001)
    assert figures["tpot_ms_p50"] == pytest.approx(tpot * 1000, rel=0.001)
    assert figures["e2e_ms_p90"] == pytest.approx((ttft + 19 * tpot) * 1000, rel=0.001)
    assert figures["output_tokens_per_second"] == pytest.approx(4 * NEW / (ttft + 19 * tpot), rel=0.001)
    assert figures["requests_per_second"] == pytest.approx(4 / (ttft + 19 * tpot), rel=0.001)
    assert figures["makespan_s"] == pytest.approx(25 * (ttft + 19 * tpot), rel=0.001)
    assert figures["itl_ms_max_p90"] == pytest.approx(tpot * 1000, rel=0.001)
    assert [reply.ids for reply in replies] == [tuple(Model().decode(prompt(place), NEW)) for place in range(100)]
    assert recording.stall_seconds == 0
    assert [each.times for each in timelines] == [pytest.approx(job.due) for job in jobs]


def test_latency_counts_from_the_scheduled_time() -> None:
    schedule = Poisson.draw(rate=12.0, requests=600, seed=3)
    timelines, jobs, recording, _ = run(schedule.load, 600, slots=2)
    start = recording.start
    assert [each.intended - start for each in timelines] == pytest.approx(schedule.times)
    assert max(recording.lags) < 1e-9
    truth = [job.due[0] - job.arrival for job in jobs]
    waits = np.array(truth) - A - B * PROMPT
    assert waits.max() > 0.1  # there is a queue
    figures = serving.summary([timelines]).values
    span = serving.window(timelines)
    inside = [value * 1000 for value, each in zip(truth, timelines, strict=True) if each.intended >= span.start]
    for percent in (50, 90, 99):
        assert figures[f"ttft_ms_p{percent}"] == pytest.approx(np.percentile(inside, percent), rel=0.01)
    tokens = [due for job in jobs for due in job.due]
    came = sum(span.start < due <= span.end for due in tokens)
    assert figures["output_tokens_per_second"] == pytest.approx(came / span.seconds, rel=0.01)
    assert figures["output_tokens_per_second"] == pytest.approx(12 * NEW, rel=0.05)


def test_what_a_client_waits_for_counts() -> None:
    """Connections take 0.3 s, and requests leave so much later than they were to: no coordinated omission. It is the
    server that the client waits for (TLS, say), so it does not lag."""
    loop = Loop()
    target = Target("http://fake")
    bodies = [target.request(COMPLETIONS.path, COMPLETIONS.body("fake", prompt(n), NEW, True)) for n in range(30)]
    load = Open(tuple(0.01 * (n + 1) for n in range(30)))
    recording = send(loop, Server(Engine(loop, slots=30)), bodies, load, delay=0.3)
    loop.close()
    assert [each.sent - each.intended for each in recording.exchanges] == pytest.approx([0.3] * 30)
    assert len(recording.lags) == 30
    assert max(recording.lags) < 1e-9
    timelines = [stream.timeline(stream.read(each, COMPLETIONS)) for each in recording.exchanges]
    figures = serving.summary([timelines]).values
    ttft = A + B * PROMPT
    assert figures["ttft_sent_ms_p50"] == pytest.approx(ttft * 1000, rel=0.001)
    assert figures["ttft_ms_p50"] == pytest.approx((0.3 + ttft) * 1000, rel=0.001)
    assert figures["e2e_ms_p50"] > figures["ttft_ms_p50"] + 19 * C * 1000


def test_a_burst_has_a_makespan_and_all_tokens() -> None:
    timelines, _, _, _ = run(burst(59), 59, slots=8)
    figures = serving.summary([timelines]).values
    assert figures["output_tokens_per_second"] == pytest.approx(59 * NEW / figures["makespan_s"])
    # eight at a time, in lock step while there are eight; the last three are faster
    ttft = A + B * PROMPT
    rounds = 7 * (ttft + 19 * (C + 8 * D)) + ttft + 19 * (C + 3 * D)
    assert figures["makespan_s"] == pytest.approx(rounds, rel=0.01)
    assert figures["ttft_ms_p50"] > 3 * (ttft + 19 * (C + 8 * D)) * 1000


def test_tokens_are_counted_from_ids_not_from_events() -> None:
    plain, _, _, _ = run(Closed(4), 100)
    chunks, _, _, replies = run(Closed(4), 100, ("chunks",))
    assert len(replies[0].events) == 5
    mine, other = serving.summary([chunks], 4).values, serving.summary([plain], 4).values
    for name in ("tpot_ms_p50", "e2e_ms_p50", "output_tokens_per_second"):
        assert mine[name] == pytest.approx(other[name], rel=0.01)
    speculation, jobs, _, _ = run(Closed(1), 30, ("speculation",))
    tpots = [(job.due[-1] - job.due[0]) / 19 for job in jobs]
    assert serving.summary([speculation], 1).values["tpot_ms_p50"] == pytest.approx(np.median(tpots) * 1000, rel=0.001)


@pytest.mark.parametrize("faults", [("split",), ("pings",), ("cumulative",), ("split", "pings", "cumulative")])
def test_what_a_client_must_bear_changes_no_figure(faults: tuple[str, ...]) -> None:
    plain, _, _, whole = run(Closed(2), 40)
    strange, _, _, replies = run(Closed(2), 40, faults)
    assert [reply.text for reply in replies] == [reply.text for reply in whole]
    mine, other = serving.summary([strange], 2).values, serving.summary([plain], 2).values
    assert mine == pytest.approx(other, rel=1e-6)


def test_a_server_of_text_counts_by_usage() -> None:
    timelines, _, _, replies = run(Closed(2), 40, ("cumulative",))
    assert replies[0].ids is None and replies[0].tokens is None
    assert [sum(each.tokens) for each in timelines] == pytest.approx([NEW] * 40)
    assert sum(stream.timeline(replies[0], count=lambda text: 31).tokens) == pytest.approx(31)


def test_windows_that_are_too_short_have_no_throughput() -> None:
    timelines, _, _, _ = run(Closed(4), 40)
    values, missing = serving.summary([timelines], 4)
    assert "output_tokens_per_second" not in values
    assert "too short, of 60 s or 20 requests a slot" in missing["output_tokens_per_second"]
    assert missing["ttft_ms_p99"] == "36 requests; p99 needs 500"  # without the first of each slot


def test_a_long_first_request_makes_no_burst() -> None:
    """One of two starts never is steady: there is a reason instead of a throughput."""
    even, _, _, _ = run(Closed(4), 100)
    hung = [replace(even[0], end=even[-1].end + 600, times=(), tokens=(), outcome="failed"), *even[1:]]
    assert "output_tokens_per_second" in serving.summary([even, even], 4).values
    values, missing = serving.summary([even, hung], 4)
    assert "output_tokens_per_second" not in values
    assert missing["output_tokens_per_second"].startswith("0.0 s and ")
    assert "too short" in missing["output_tokens_per_second"]
    assert values["failed"] == 1


def test_the_drain_is_no_part_of_the_window() -> None:
    """Four slots and 86 requests: the last two are in flight alone, and faster. Nor are the first four of it."""
    timelines, _, _, _ = run(Closed(4), 86)
    span = serving.window(timelines, 4)
    assert span.end == max(each.intended for each in timelines)
    assert span.start == max(each.end for each in timelines[:4])
    assert serving.summary([timelines], 4).values["output_tokens_per_second"] == pytest.approx(
        4 * NEW / (A + B * PROMPT + 19 * (C + 4 * D)), rel=0.01
    )


def test_gaps_of_a_schedule_are_as_they_were_drawn() -> None:
    schedule = Poisson.draw(5.0, 2000, seed=1)
    assert schedule.sha256 == Poisson.draw(5.0, 2000, seed=1).sha256 != Poisson.draw(5.0, 2000, seed=2).sha256
    gaps = np.diff((0.0, *schedule.times))
    assert gaps.mean() == pytest.approx(0.2, rel=3 / math.sqrt(2000))
    assert gaps.mean() != pytest.approx(0.2, abs=1e-6)  # it is not rescaled to its rate
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    faster = Poisson.draw(10.0, 2000, seed=1)
    assert np.array(faster.times) * 2 == pytest.approx(np.array(schedule.times), abs=1e-5)


def test_a_schedule_needs_a_time_for_each_request() -> None:
    with pytest.raises(ValueError, match="3 times for 2 requests"):
        run(Open((0.0, 0.1, 0.2)), 2)
    with pytest.raises(ValueError, match="not in order"):
        Open((0.2, 0.1))


@pytest.mark.parametrize(("load", "slots"), [(Closed(4), 4), (burst(86), None)])
def test_distributions_and_latencies_have_the_same_requests(load: Load, slots: int | None) -> None:
    """Without the first of each slot, which waited for a second here; of a burst, of all."""
    timelines, _, _, _ = run(load, 86)
    late = [replace(each, times=tuple(time + 1 for time in each.times), end=each.end + 1) for each in timelines[:4]]
    asked = [LoadRequest(prompt(place), NEW) for place in range(86)]
    loaded = LoadResult(
        planned=PlannedLoad("load", asked, load, slots),
        timelines=[*late, *timelines[4:]],
        findings=[],
        client={"cpu_fraction": 0.0, "schedule_lag_ms_p99": 0.0},
        counters=vars(Counters()),
        events=86 * NEW,
        span=(0.0, 1.0),
        host=None,
        own=[],
        conditions={"decode_joules": None},
    )
    joined = result.join([loaded], [], {"ttft_ms": 500.0, "tpot_ms": 100.0})
    figures, at = joined["figures"], dict(zip(serving.LEVELS, joined["quantiles"]["ttft_ms"], strict=True))
    assert (at[0.5], at[0.9]) == (figures["ttft_ms_p50"], figures["ttft_ms_p90"])
    assert (at[0.99] > 1000) == (slots is None)
