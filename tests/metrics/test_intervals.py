"""Intervals, the largest rate and steadiness, on simulated servers whose truth is known."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from timeline import Engine, Heap, Job

from quantmill.client.schedule import Poisson
from quantmill.loads import result
from quantmill.metrics import goodput, restarts, serving, steadiness

TOKENS = 2


def simulate(rate: float, seed: int, speed: float = 1.0, number: int = 120, **engine: float) -> list[serving.Timeline]:
    """Run Poisson arrivals at a server that is `speed` times slower."""
    clock = Heap()
    server = Engine(clock, speed=lambda now: speed, **engine)
    for at in Poisson.draw(rate, number, seed).times:
        clock.call_at(at, server.submit, Job(40, TOKENS))
    clock.run()
    return timelines(server)


def timelines(server: Engine) -> list[serving.Timeline]:
    return [
        serving.Timeline(place, job.arrival, job.arrival, job.due[-1], tuple(job.due), (1.0,) * len(job.due))
        for place, job in enumerate(server.jobs)
    ]


def closed(speed: float, noise: np.ndarray, slots: int = 2) -> list[serving.Timeline]:
    """Run a closed loop at a server whose speed also wanders, from one twentieth of a second to the next."""
    clock = Heap()
    server = Engine(clock, speed=lambda now: speed * noise[int(now * 20) % len(noise)])
    left = [150 * slots]

    def submit() -> None:
        if left[0]:
            left[0] -= 1
            server.submit(Job(40, 1, emit=follow))

    def follow(tokens: int, last: bool) -> None:
        if last:
            clock.call_at(clock.time(), submit)

    for _ in range(slots):
        clock.call_at(0.0, submit)
    clock.run()
    return timelines(server)


def wander(rng: np.random.Generator) -> np.ndarray:
    return np.exp(rng.normal(0, 0.05, 120))


def truth() -> float:
    """Return the mean server's tokens per second, from enough runs for an error of a thousandth."""
    rng = np.random.default_rng(99)
    tokens = seconds = 0.0
    for _ in range(60):
        run = closed(1.0, wander(rng))
        end = max(each.intended for each in run)
        tokens += sum(time <= end for each in run for time in each.times)
        seconds += end
    return tokens / seconds


@pytest.mark.parametrize("starts", [1, 5])
def test_intervals_have_their_coverage(starts: int) -> None:
    """200 simulated studies of one server. Its starts differ by 3%, twentieths of a second within each by 5%."""
    right, inside, rng = truth(), 0, np.random.default_rng(starts)
    for _ in range(200):
        between = np.exp(rng.normal(0, 0.03, starts)) if starts > 1 else np.ones(1)
        found = restarts.throughput([closed(speed, wander(rng)) for speed in between], 2)
        inside += found.low <= right <= found.high
    assert 0.9 <= inside / 200 <= 0.99


def test_an_interval_of_one_start_is_too_narrow() -> None:
    """Restarts are the samples, because intervals of one start each miss the truth most of the time."""
    right, inside, rng = truth(), 0, np.random.default_rng(1)
    for _ in range(50):
        found = restarts.throughput([closed(float(np.exp(rng.normal(0, 0.03))), wander(rng))], 2)
        inside += found.low <= right <= found.high
    assert inside / 50 < 0.7


def test_ratios_of_servers_have_their_coverage() -> None:
    """100 simulated comparisons of three starts each, that differ by 2%."""
    inside, rng = 0, np.random.default_rng(1)
    for study in range(100):
        speeds = np.exp(rng.normal(0, 0.02, (2, 3)))
        a, b = ([simulate(15.0, study * 3 + place, float(each[place]), 30) for place in range(3)] for each in speeds)
        found = restarts.compare(a, b)["ttft"]
        inside += found.low <= 1 <= found.high
    assert 0.9 <= inside / 100 <= 0.99


def test_two_servers_are_compared_request_by_request() -> None:
    """Four starts of each under the same schedules. One is 3% slower: what a pair has in common hides that unpaired."""
    rng, speeds = np.random.default_rng(3), np.exp(np.random.default_rng(4).normal(0, 0.01, 5))
    seeds = rng.integers(1000, size=5).tolist()
    a = [simulate(15.0, seed, speed) for seed, speed in zip(seeds, speeds, strict=True)]
    b = [simulate(15.0, seed, speed * 1.03) for seed, speed in zip(seeds, speeds, strict=True)]
    found = restarts.compare(a, b)
    for name in ("ttft", "tpot", "e2e"):
        assert found[name].low <= 1.03 <= found[name].high
        assert found[name].low > 1.01  # and not 1
    assert found["output_tokens_per_second"].value == pytest.approx(1.0, abs=0.01)  # arrivals decide that
    assert restarts.compare(a, a)["ttft"] == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="loads differ"):
        restarts.compare(a, b[:2])
    with pytest.raises(ValueError, match="loads differ"):
        restarts.compare(a, [run[:-1] for run in b])


def test_a_burst_is_one_sample() -> None:
    def run(seconds: float) -> list[serving.Timeline]:
        return [serving.Timeline(n, 0.0, 0.0, seconds, (seconds / 2, seconds), (1.0, 9.0)) for n in range(4)]

    assert restarts.throughput([run(2.0)]) == (20.0, None, None)
    both = restarts.throughput([run(2.0), run(2.1)])
    assert both.low < both.value < both.high
    assert restarts.compare([run(2.0)], [run(1.0)])["output_tokens_per_second"] == (2.0, None, None)


def test_the_exact_interval_of_a_share() -> None:
    """Values of published tables: 0 and 10 of 10, 5 of 10, 81 of 263 (Agresti and Coull 1998, Newcombe 1998)."""
    assert goodput.clopper_pearson(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert goodput.clopper_pearson(10, 10) == pytest.approx((0.6915, 1.0), abs=1e-4)
    assert goodput.clopper_pearson(5, 10) == pytest.approx((0.1871, 0.8129), abs=1e-4)
    assert goodput.clopper_pearson(81, 263) == pytest.approx((0.2527, 0.3676), abs=1e-4)
    low, high = goodput.clopper_pearson(9900, 10000)
    assert low == pytest.approx(0.98785, abs=1e-4) and high == pytest.approx(0.99186, abs=1e-4)


def test_requests_without_an_answer_miss_the_limits() -> None:
    def line(outcome: str, ttft: float = 0.1, tpot: float = 0.01) -> serving.Timeline:
        return serving.Timeline(0, 0.0, 0.0, 1.0, (ttft, ttft + tpot), (1.0, 1.0), outcome)

    made = [
        line("ok"),
        line("ok", ttft=0.3),
        line("ok", tpot=0.05),
        line("rejected"),
        line("failed"),
        line("unfinished"),
    ]
    assert goodput.slo_attainment(made, ttft=0.2, tpot=0.02) == (1, 6)


def test_goodput_of_a_queue_lies_in_the_bracket() -> None:
    """One slot and equal requests are a queue M/D/1. On the arrivals that were drawn, waits follow from one another
    (Lindley 1952); of all that could be drawn, their distribution is known (Erlang 1909)."""
    service = 0.02 + 0.0001 * 40 + 0.0045  # TTFT and one token more
    limit = 2 * service  # seconds of waiting
    gaps = np.diff(Poisson.draw(1.0, 4000, 5).times)

    def met(rate: float) -> float:
        wait, good = 0.0, 1
        for gap in gaps / rate:
            wait = max(0.0, wait + service - gap)
            good += wait <= limit
        return good / (len(gaps) + 1)

    def share(rate: float) -> float:
        """P(wait <= limit) = (1 - load) x sum over k of x^k / k! x exp(-x), where x = rate (k service - limit)"""
        terms = (
            (rate * (k * service - limit)) ** k / math.factorial(k) * math.exp(-rate * (k * service - limit))
            for k in range(int(limit / service) + 1)
        )
        return (1 - rate * service) * sum(terms)

    def largest(function: Callable[[float], float]) -> float:
        low, high = 1.0, 0.999 / service
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if function(middle) >= goodput.GOOD else (low, middle)
        return low

    def measure(rate: float) -> tuple[int, int]:
        return goodput.slo_attainment(simulate(rate, 5, number=4000, slots=1), ttft=0.024 + limit, tpot=1.0)

    found = goodput.goodput(measure, start=4.0)
    assert found.above / found.rate < 1 + goodput.BRACKET
    assert found.rate <= largest(met) <= found.above
    assert found.proven <= largest(share) <= found.refuted
    assert found.proven <= found.rate < found.above <= found.refuted
    assert len(found.trials) < 12


def test_a_rate_that_is_always_met_or_never() -> None:
    always = goodput.goodput(lambda rate: (100, 100), start=1.0)
    assert (always.rate, always.above, len(always.trials)) == (2.0**23, None, 24)
    never = goodput.goodput(lambda rate: (98, 100), start=1.0)
    assert (never.rate, never.above, never.proven) == (None, 2.0**-23, None)


def test_a_steady_load_is_seldom_called_unstable() -> None:
    wrong = 0
    for seed in range(100):
        run = simulate(20.0, seed, number=300)
        wrong += steadiness.instability(run, serving.window(run)) is not None
    assert wrong <= 10


def test_a_queue_that_grows_is_always_called_unstable() -> None:
    for seed in range(20):
        run = simulate(60.0, seed, slots=1)
        reason = steadiness.instability(run, serving.window(run))
        assert "requests in flight grows" in reason and "TTFT grows" in reason


def uneven(runs: list[list[serving.Timeline]]) -> steadiness.Part | None:
    return steadiness.uneven_tokens(runs, serving.windows(runs, 2))


def test_a_slow_middle_of_a_load_is_found() -> None:
    """Of 100 loads of three starts, in which twentieths of a second differ by 5% and starts by 3%: none that was even,
    and nearly all whose second start was 1.5 times slower for its middle."""
    rng, wrong, found = np.random.default_rng(7), 0, 0
    for _ in range(100):
        noise = [wander(rng) * np.exp(rng.normal(0, 0.03)) for _ in range(3)]
        wrong += uneven([closed(1.0, each) for each in noise]) is not None
        noise[1][30:90] *= 1.5
        found += uneven([closed(1.0, each) for each in noise]) is not None
    assert wrong <= 2
    assert found >= 95


def test_an_unsteady_load_is_described() -> None:
    noise = np.where(np.arange(120) < 60, 1.0, 2.0)
    assert result.unsteady([closed(1.0, np.ones(120))], 2) == []
    (reason,) = result.unsteady([closed(1.0, noise)], 2)
    assert reason.startswith("not steady: from ") and "of its time it was" in reason
    assert result.unsteady([closed(1.0, noise)], None) == []
