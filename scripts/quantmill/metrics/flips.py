"""Flips between the answers of a candidate and the reference on the same documents.

A flip is a document that one of the two answers correctly and the other does not ("Accuracy is Not All You Need",
arXiv 2407.09141). Accuracy hides flips if as many turn right as wrong.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

from quantmill.metrics.bootstrap import CONFIDENCE

Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
STEPS = 60  # of a bisection between -1 and 1, beyond the resolution of float64


def count(candidate: Sequence[bool], reference: Sequence[bool]) -> tuple[int, int]:
    """Count the documents that only the candidate answers correctly, and those that only the reference does."""
    pairs = list(zip(candidate, reference, strict=True))
    return sum(one and not other for one, other in pairs), sum(other and not one for one, other in pairs)


def interval(gained: int, lost: int, documents: int) -> tuple[float, float]:
    """Return the 95% interval of the difference of two paired shares, (gained - lost) / documents.

    It contains the differences that the score test does not reject. For a difference of 0 that is McNemar's test: 0 is
    inside if (gained - lost)^2 is at most 1.96^2 (gained + lost). Tango, Statistics in Medicine 17, 1998; recommended
    for small and large samples by Fagerland, Lydersen and Laake, Statistics in Medicine 33, 2014.
    """
    estimate = (gained - lost) / documents

    def edge(outside: float, sign: int) -> float:
        inside = estimate
        for _ in range(STEPS):
            middle = (inside + outside) / 2
            if sign * score(middle, gained, lost, documents) <= Z:
                inside = middle
            else:
                outside = middle
        return inside

    return edge(-1.0, 1), edge(1.0, -1)


def score(difference: float, gained: int, lost: int, documents: int) -> float:
    """Return the score test's statistic of a difference; it falls as the difference grows.

    Its variance is that of the likeliest shares with this difference: the root of a quadratic equation in the share
    that only the reference answers correctly.
    """
    n = documents
    b = (2 * n - gained + lost) * difference - gained - lost
    c = -lost * difference * (1 - difference)
    only_reference = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
    variance = n * (2 * only_reference + difference * (1 - difference))
    distance = gained - lost - n * difference
    if variance <= 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)
