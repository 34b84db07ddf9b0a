"""Percentile bootstrap (Efron 1979) with a fixed seed, so that an interval is reproducible.

With few samples the plain percentiles are too narrow, so they are widened by Student's t. The coverage of the 95%
interval of 5, 10 and 30 normal samples is then 90, 94 and 94% instead of 82, 89 and 93%. This is the expanded
percentile interval of Hesterberg, "What Teachers Should Know about the Bootstrap" (arXiv 1411.5279).
"""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
MINIMUM = 5  # samples; fewer give no interval
# of 1, 2 and 3 degrees of freedom, from the closed form of the distribution (Abramowitz and Stegun, 26.7.3 and 26.7.4)
STUDENT_T = {1: 12.706204736174659, 2: 4.302652729749458, 3: 3.182446305283705}


@lru_cache(maxsize=1)  # a report needs the same ones for every pair of rows
def indices(n: int, seed: int = 0) -> np.ndarray:
    """Draw read-only indices [RESAMPLES, n] with replacement from range(n).

    The same n always gives the same draws. So two results of the same windows are resampled alike, and their difference
    is paired.
    """
    drawn = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    drawn.setflags(write=False)
    return drawn


def interval(replicates: np.ndarray, n: int | None = None) -> tuple[float, float]:
    """Return the central 95% of bootstrap replicates; widened for n samples (at least 5) if n is given."""
    tail = (1 - CONFIDENCE) / 2
    if n is not None:
        tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_t(n - 1))
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return float(low), float(high)


@lru_cache
def student_t(freedom: int) -> float:
    """Return the upper 2.5% point of Student's t, to 0.3% from 4 degrees of freedom on and to 0.1% below.

    By the Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5), which is too small below 4.
    """
    if freedom in STUDENT_T:
        return STUDENT_T[freedom]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
