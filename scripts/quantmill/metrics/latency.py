"""Latency statistics from raw token times.

A run decodes N tokens after one prompt. TTFT is the time to the first token; TPOT = (time of the last - time of the
first) / (N - 1); throughput is the sum of tokens over the sum of times, never a mean of ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from quantmill.metrics import bootstrap, steadiness

BLOCKS = 24  # blocks of time; the others' loss is relative to the fastest one
BEYOND = 0.07  # logarithm of a loss beyond noise, from which on it is a slow-down
UNEVEN = 1.5  # ratio of the runs' variation to that of neighbours, from which on some runs were slowed down
QUARTILE = NormalDist().inv_cdf(0.75)
SCATTER = 0.15  # share by which all repeats may take longer than the faster ones of each prompt


@dataclass(frozen=True)
class Sample:
    """Seconds from the prompt's hand-over to each token's arrival on the host, for one prompt in one process."""

    process: int
    repeat: int
    prompt: int
    token_seconds: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.token_seconds[0]

    @property
    def tpot(self) -> float:
        """Time per output token after the first, in seconds."""
        return (self.token_seconds[-1] - self.token_seconds[0]) / (len(self.token_seconds) - 1)


def _seconds(runs: Sequence[Sample]) -> np.ndarray:
    """Return the seconds per token [processes, repeats, prompts] of runs, one for each combination."""
    keys = [(run.process, run.repeat, run.prompt) for run in runs]
    places = [{value: place for place, value in enumerate(sorted(set(axis)))} for axis in zip(*keys, strict=True)]
    seconds = np.full([len(axis) for axis in places], np.nan)
    for key, run in zip(keys, runs, strict=True):
        place = tuple(axis[value] for axis, value in zip(places, key, strict=True))
        seconds[place] = run.token_seconds[-1] / len(run.token_seconds)
    return seconds


def _against_prompts(seconds: np.ndarray) -> np.ndarray:
    """Return each run's time over the mean of its prompt's runs, [processes, repeats, prompts] in order of time."""
    return seconds / seconds.mean(axis=(0, 1))


def tokens_per_second(runs: Sequence[Sample]) -> tuple[float, float, float]:
    """Return throughput and a 95% interval that covers the speed of the undisturbed machine (docs/METHODS.md, Latency).

    Processes and prompts are both samples. The half-width of processes is Student's t times the standard error of their
    means (of blocks of time for one process). The half-width of prompts, by the normal distribution, is added as the
    root of the sum of squares (method of variance estimates recovery: Zou and Donner, Statistics in Medicine 27, 2008).
    Ends are computed in logarithms. After a slow-down the upper end lies as far above the fastest part of the
    measurement as it otherwise lies above the mean, because the truth may be there.

    Args:
        runs: one for each combination of process, repeat and prompt, with equal numbers of tokens.
    """
    seconds = _seconds(runs)
    processes, repeats, _ = seconds.shape
    mean, relative = float(seconds.mean()), _against_prompts(seconds)
    blocks = np.array([block.mean() for block in np.array_split(relative.ravel(), BLOCKS) if len(block)])
    of_time = seconds.mean(axis=(1, 2)) / mean
    if processes == 1 and repeats > 1:
        # the prompts' means have absorbed one repeat's share of the variation
        of_time = 1 + (blocks - 1) * math.sqrt(repeats / (repeats - 1))
    by_time = _error(of_time) * bootstrap.student_t(len(of_time) - 1) if len(of_time) > 1 else 0.0
    by_prompts = _error(seconds.mean(axis=(0, 1)) / mean) * NormalDist().inv_cdf((1 + bootstrap.CONFIDENCE) / 2)
    half = up = math.hypot(by_time, by_prompts)
    if processes * repeats > 1:
        noise, usual = _noise(relative.ravel())
        fastest = NormalDist().inv_cdf((len(blocks) - 0.375) / (len(blocks) + 0.25)) if len(blocks) > 1 else 0.0
        fastest *= usual / math.sqrt(relative.size / len(blocks))  # expected for blocks without a slow-down (Blom 1958)
        lost = max(-math.log(blocks.min()), _lost(seconds))
        beyond = max(-math.log(blocks.min()) - fastest, _lost(seconds) - QUARTILE * usual, 0.0)
        within = relative / relative.mean(axis=(1, 2), keepdims=True)
        scatter = float(within.std()) * math.sqrt(processes * repeats / (processes * repeats - 1))
        slowed = beyond > BEYOND or scatter > UNEVEN * noise
        up = half + lost if slowed else max(half, beyond + by_prompts)
    return 1 / mean, math.exp(-half) / mean, math.exp(up) / mean


def _error(means: np.ndarray) -> float:
    """Return the standard error of the mean of means; 0 for one."""
    return float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def _noise(relative: np.ndarray) -> tuple[float, float]:
    """Estimate the standard deviation of single runs without slow-downs: the lower estimate, and the usual one.

    From the smaller differences of neighbours in time, which a lasting slow-down does not affect (the median of normal
    values: Rousseeuw and Croux, JASA 88, 1993).
    """
    found = []
    for share in (1 / 3, 1 / 2):
        difference = float(np.quantile(np.abs(np.diff(relative)), share))
        found.append(difference / NormalDist().inv_cdf((1 + share) / 2) / math.sqrt(2))
    return min(found), found[-1]


def _lost(seconds: np.ndarray) -> float:
    """Return the logarithm of the runs' mean time over that of the fastest quarter of each prompt."""
    return math.log(float(seconds.mean() / np.quantile(seconds, 0.25, axis=(0, 1)).mean()))


def unsteadiness(runs: Sequence[Sample]) -> str | None:
    """Describe a change of the machine's speed that a row's samples show, in words; None if there is none.

    Args:
        runs: as for `tokens_per_second`; in order of processes, then repeats, then prompts.
    """
    seconds = _seconds(runs)
    part = steadiness.uneven_part(np.log(_against_prompts(seconds)).ravel().tolist())
    if part:
        return f"not steady: {part}"
    if _lost(seconds) > math.log(1 + SCATTER):
        more = math.exp(_lost(seconds)) - 1
        return (
            f"not steady: repeats of one prompt differ so much that all took {more:.0%} longer than the faster quarter"
        )
    return None


def summary(runs: list[Sample]) -> dict[str, float]:
    """Return percentiles of TTFT, TPOT and inter-token latency in milliseconds, and throughput with its interval."""
    samples: dict[str, np.ndarray | list[float]] = {
        "ttft_ms": [run.ttft for run in runs],
        "tpot_ms": [run.tpot for run in runs],
        "itl_ms": np.concatenate([np.diff(run.token_seconds) for run in runs]),
    }
    result = {}
    for name, seconds in samples.items():
        for percent in (50, 90, 99):
            result[f"{name}_p{percent}"] = float(np.percentile(seconds, percent)) * 1000
    rate, low, high = tokens_per_second(runs)
    return result | {"tokens_per_second": rate, "tokens_per_second_low": low, "tokens_per_second_high": high}
