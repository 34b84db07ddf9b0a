"""Flips and McNemar's interval against a published example, the test itself, and another way to calculate them."""

import json
import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
from conftest import interpreter
from hypothesis import given
from hypothesis import strategies as st

from quantmill.metrics import flips

Z = NormalDist().inv_cdf(0.975)
CASES = [(1, 7, 21), (40, 20, 160), (0, 3, 50), (11, 0, 12), (5, 5, 1000), (300, 260, 14_042), (2, 31, 164)]


def test_a_flip_is_right_for_one_only() -> None:
    assert flips.count([True, True, False, False, True], [True, False, True, False, False]) == (2, 1)


def test_the_interval_of_a_published_example() -> None:
    """Airway hyper-responsiveness of 21 children before and after a transplantation (Bentur and others, 2009): Tango's
    interval in Fagerland, Lydersen and Laake, Statistics in Medicine 33, 2014."""
    low, high = flips.interval(1, 7, 21)
    assert (round(low, 3), round(high, 3)) == (-0.517, -0.026)


@given(st.integers(0, 400), st.integers(0, 400), st.integers(1, 5000))
def test_intervals_agree_with_mcnemars_test(gained: int, lost: int, others: int) -> None:
    documents = gained + lost + others
    low, high = flips.interval(gained, lost, documents)
    assert -1 <= low <= (gained - lost) / documents <= high <= 1
    statistic = (gained - lost) ** 2
    if not math.isclose(statistic, Z**2 * (gained + lost), rel_tol=1e-9):
        assert (low <= 0 <= high) == (statistic < Z**2 * (gained + lost))
    assert flips.interval(lost, gained, documents) == pytest.approx((-high, -low), abs=1e-9)


# the likeliest shares with a difference are searched for, where the project solves an equation; and the exact test
CHECK = """
import json, sys
from math import inf, log, sqrt
from scipy import optimize, stats

def score(difference, b, c, n):
    def loss(q):
        parts = ((b, q + difference), (c, q), (n - b - c, 1 - 2 * q - difference))
        return inf if any(k and p <= 0 for k, p in parts) else -sum(k * log(p) for k, p in parts if k)
    bounds = max(0, -difference), (1 - difference) / 2
    q = optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-13}).x
    return (b - c - n * difference) / sqrt(n * (2 * q + difference * (1 - difference)))

found = []
for b, c, n in json.loads(sys.argv[1]):
    z, middle = stats.norm.ppf(0.975), (b - c) / n
    edges = [optimize.brentq(lambda d: score(d, b, c, n) - sign * z, *sorted((middle, sign * -0.999999)))
             if abs(middle) < 1 or sign * middle > 0 else middle for sign in (1, -1)]
    found.append([*edges, stats.binomtest(b, b + c).pvalue])
print(json.dumps(found))
"""


def test_another_formula_and_the_exact_test_agree(call: Callable) -> None:
    result = call(interpreter("lm-eval"), "-c", CHECK, json.dumps(CASES))
    assert result.returncode == 0, result.stderr
    for case, (low, high, chance) in zip(CASES, json.loads(result.stdout), strict=True):
        assert flips.interval(*case) == pytest.approx((low, high), abs=2e-5)
        if not 0.02 < chance < 0.1:  # the two tests differ where few answers flip
            assert (flips.interval(*case)[0] <= 0 <= flips.interval(*case)[1]) == (chance >= 0.05)
