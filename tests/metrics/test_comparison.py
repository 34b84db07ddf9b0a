"""Intervals of ratios of speeds, against independently known ones and against simulated runs."""

import math

import numpy as np
import pytest
from whole_results import set_rate

from quantmill.metrics import latency
from quantmill.report.comparison import rate_ratio


def test_a_ratios_interval_is_of_independent_runs() -> None:
    half = 0.1  # of each interval, as logarithms
    one, other = {}, {}
    set_rate(one, 100, 100 * math.exp(-half), 100 * math.exp(half))
    set_rate(other, 80, 80 * math.exp(-half), 80 * math.exp(half))
    ratio, low, high = rate_ratio(one, other)
    assert ratio == pytest.approx(0.8)
    assert (low, high) == pytest.approx((0.8 * math.exp(-half * math.sqrt(2)), 0.8 * math.exp(half * math.sqrt(2))))
    assert rate_ratio(other, one) == pytest.approx((1 / ratio, 1 / high, 1 / low))


def test_equal_runs_seldom_differ_and_slower_ones_do() -> None:
    random = np.random.default_rng(0)

    def measure(slower: float) -> dict[str, float]:
        runs = []
        for process in range(4):
            speed = 1 + 0.02 * random.standard_normal()
            for prompt in range(8):
                seconds = slower * speed * (1 + 0.03 * random.standard_normal()) * np.arange(1, 11) / 100
                runs.append(latency.Sample(process, 0, prompt, tuple(seconds)))
        row: dict[str, float] = {}
        set_rate(row, *latency.tokens_per_second(runs))
        return row

    def count_slower(slower: float) -> int:
        return sum(rate_ratio(measure(1), measure(slower))[2] < 1 for _ in range(100))

    assert count_slower(1) <= 10  # 5 of 100 are expected on both sides together, where the intervals are right
    assert count_slower(1.1) >= 90
