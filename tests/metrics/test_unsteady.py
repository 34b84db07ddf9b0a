"""Intervals of rows whose host slows down in the middle, and how such rows are marked: simulated, of known truth."""

import re

import numpy as np
import pytest
from simulated_rows import (
    Slowdown,
    long_bursts,
    one_slow_process,
    periodic,
    quiet,
    ramp,
    short_bursts,
    simulate,
    slow_middle,
    step,
)

from quantmill.metrics import latency, steadiness


@pytest.mark.parametrize(
    ("slowdown", "found"),
    [
        (step, 0.8),
        (slow_middle, 0.8),
        (ramp, 0.5),
        (long_bursts, 0.1),
        (periodic, 0.5),
        (short_bursts, 0),
        (one_slow_process, 0.8),
    ],
)
def test_intervals_of_slowed_rows_cover_the_undisturbed_speed(slowdown: Slowdown, found: float) -> None:
    """At least 95% of 1,000 rows; of a binomial share of 0.95, 0.935 is two standard errors away. Of those that are not
    marked too, as far as they are enough to say. Slower by 1.2 to 1.8: what is small or short is not marked."""
    holds, left, marked = simulate(slowdown, processes=3, repeats=3, spread=0.02, seed=1)
    assert holds >= 0.935
    assert left >= 0.935 or marked > 0.95
    assert marked >= found


@pytest.mark.parametrize(("processes", "repeats"), [(2, 2), (3, 3), (5, 1), (5, 3)])
@pytest.mark.parametrize("spread", [0.02, 0.05])
def test_a_quiet_row_is_seldom_marked(processes: int, repeats: int, spread: float) -> None:
    holds, _, marked = simulate(quiet, processes, repeats, spread, seed=2)
    assert holds >= 0.935
    assert marked <= 0.02


def test_a_host_that_slowed_down_is_described() -> None:
    """Three processes of three repeats: from the middle of the second on, 1,616 tokens/s instead of 2,640."""
    speeds = np.where(np.arange(81) < 40, 2640.0, 1616.0).reshape(3, 3, 9)
    runs = [latency.Sample(*place, (1 / each, 2 / each)) for place, each in np.ndenumerate(speeds)]
    reason = latency.unsteadiness(runs)
    assert re.fullmatch(
        r"not steady: from (4[5-9]|5[0-5])% to 100% of its runs it was 1\.[56]\d times slower than in the rest", reason
    )
    _, low, high = latency.tokens_per_second(runs)
    assert low < 1616 and high > 2640


def test_a_part_is_told_as_the_slow_one() -> None:
    assert str(steadiness.Part(0.2, 0.4, 1.5)).startswith("from 20% to 40% of its runs it was 1.50 times slower")
    assert str(steadiness.Part(0.2, 1.0, 0.5)).startswith("from 0% to 20% of its runs it was 2.00 times slower")
    assert str(steadiness.Part(0.2, 0.4, 0.5)).startswith("from 20% to 40% of its runs it was 2.00 times faster")


def test_values_that_differ_without_an_order_are_even() -> None:
    """Runs that differ by 20% each are noisy, and no part of them is slow; in order they are not even."""
    random = np.random.default_rng(5)
    noisy = [random.normal(0, 0.2, 81) for _ in range(200)]
    assert sum(steadiness.uneven_part(row) is not None for row in noisy) <= 6
    part = steadiness.uneven_part(np.sort(noisy[0]))
    assert part and not 0.8 < part.times < 1.25
    assert steadiness.uneven_part([0.3]) is steadiness.uneven_part([]) is None
    assert steadiness.uneven_part([0.0, 0.0, 1.0, 1.0]) is None  # of four values nothing is sure
