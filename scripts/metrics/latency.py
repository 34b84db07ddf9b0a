"""Latency statistics from raw token times.

A run decodes N tokens after one prompt. TTFT is the time to the first; TPOT = (time of the last - time of the first)
/ (N - 1); throughput is the sum of tokens over the sum of time, never a mean of ratios.
"""

from dataclasses import dataclass

import numpy as np

from metrics import bootstrap


@dataclass(frozen=True)
class Run:
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


def tokens_per_second(runs: list[Run]) -> tuple[float, float, float]:
    """Throughput and its 95% interval.

    Prompts and processes are both samples of what could have been measured, so both are resampled, independently (the
    pigeonhole bootstrap, Owen 2007, arXiv 0712.1111); repeats in one cell are summed.
    """
    processes = sorted({run.process for run in runs})
    prompts = sorted({run.prompt for run in runs})
    tokens, seconds = np.zeros((2, len(processes), len(prompts)))
    for run in runs:
        cell = processes.index(run.process), prompts.index(run.prompt)
        tokens[cell] += len(run.token_seconds)
        seconds[cell] += run.token_seconds[-1]
    drawn_processes = bootstrap.indices(len(processes), seed=1)[:, :, None]
    drawn_prompts = bootstrap.indices(len(prompts), seed=2)[:, None, :]
    cells = drawn_processes, drawn_prompts
    replicates = tokens[cells].sum(axis=(1, 2)) / seconds[cells].sum(axis=(1, 2))
    return (float(tokens.sum() / seconds.sum()), *bootstrap.interval(replicates))


def summary(runs: list[Run]) -> dict[str, float]:
    """Percentiles of TTFT, TPOT and inter-token gaps in milliseconds, and throughput with its interval."""
    samples = {
        "ttft_ms": [run.ttft for run in runs],
        "tpot_ms": [run.tpot for run in runs],
        "gap_ms": np.concatenate([np.diff(run.token_seconds) for run in runs]),
    }
    result = {}
    for name, seconds in samples.items():
        for percent in (50, 90, 99):
            result[f"{name}_p{percent}"] = float(np.percentile(seconds, percent)) * 1000
    rate, low, high = tokens_per_second(runs)
    return result | {"tokens_per_second": rate, "tokens_per_second_low": low, "tokens_per_second_high": high}
