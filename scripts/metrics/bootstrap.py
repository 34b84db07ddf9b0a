"""Percentile bootstrap (Efron 1979) with a fixed seed, so that a figure and its interval can be computed again."""

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


def indices(n: int, seed: int = 0) -> np.ndarray:
    """[RESAMPLES, n] indices drawn with replacement from range(n).

    The same n always gives the same draws: two files scored on the same windows are resampled alike, so that their
    difference is a paired one.
    """
    return np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))


def interval(replicates: np.ndarray) -> tuple[float, float]:
    """The central 95% of bootstrap replicates."""
    low, high = np.quantile(replicates, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
