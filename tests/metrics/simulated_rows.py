#!/usr/bin/env python3
"""Simulate rows whose host slows down, so that the truth is known: how often intervals hold it, how often rows are
marked.

    python tests/metrics/simulated_rows.py results/repeats/simulated.json
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from quantmill.common.atomic import write_json
from quantmill.common.program import parser, run
from quantmill.metrics import latency

ROWS, PROMPTS = 1000, 9
UNDISTURBED = 10.0  # tokens a second of the mean process and prompt
# of a generator and the numbers of runs and processes: how many times as slow each run is, [runs]
Slowdown = Callable[[np.random.Generator, int, int], np.ndarray]


def factor(random: np.random.Generator) -> float:
    return random.uniform(1.2, 1.8)  # 2,640 to 1,616 tokens/s is 1.63


def quiet(random: np.random.Generator, runs: int, processes: int) -> np.ndarray:
    return np.ones(runs)


def step(random: np.random.Generator, runs: int, processes: int) -> np.ndarray:
    return np.where(np.arange(runs) < random.integers(runs // 5, runs * 4 // 5), 1.0, factor(random))


def slow_middle(random: np.random.Generator, runs: int, processes: int) -> np.ndarray:
    begin = random.integers(runs // 6, runs // 2)
    slow = np.ones(runs)
    slow[begin : begin + random.integers(runs // 6, runs // 2)] = factor(random)
    return slow


def ramp(random: np.random.Generator, runs: int, processes: int) -> np.ndarray:
    begin = random.integers(0, runs // 2)
    return np.concatenate([np.ones(begin), np.linspace(1, factor(random), runs - begin)])


def short_bursts(random: np.random.Generator, runs: int, processes: int) -> np.ndarray:
    return np.where(random.random(runs) < 0.15, factor(random), 1.0)


def long_bursts(random: np.random.Generator, runs: int, processes: int) -> np.ndarray:
    slow, much = np.ones(runs), factor(random)
    for begin in random.integers(runs, size=random.integers(1, 5)):
        slow[begin : begin + random.integers(2, 8)] = much
    return slow


def periodic(random: np.random.Generator, runs: int, processes: int) -> np.ndarray:
    phase = (np.arange(runs) / random.uniform(5, runs / 2) + random.random()) % 1
    return np.where(phase < random.uniform(0.2, 0.6), factor(random), 1.0)


def one_slow_process(random: np.random.Generator, runs: int, processes: int) -> np.ndarray:
    slow = np.ones((processes, runs // processes))
    slow[random.integers(processes)] = factor(random)
    return slow.ravel()


def simulate(
    slowdown: Slowdown, processes: int, repeats: int, spread: float, seed: int, rows: int = ROWS
) -> tuple[float, float, float]:
    """Shares of rows: those whose interval holds the truth, the same of those that are not marked, and those marked.

    Processes differ by `spread`, prompts by 2% and runs by 2%.
    """
    random = np.random.default_rng(seed)
    shape = processes, repeats, PROMPTS
    holds, marked = np.zeros((2, rows), bool)
    for number in range(rows):
        logs = random.normal(0, spread, (processes, 1, 1)) + random.normal(0, 0.02, PROMPTS)
        seconds = np.exp(logs + random.normal(0, 0.02, shape)) / UNDISTURBED
        seconds *= slowdown(random, seconds.size, processes).reshape(shape)
        runs = [latency.Sample(*place, (each, 2 * each)) for place, each in np.ndenumerate(seconds)]
        _, low, high = latency.tokens_per_second(runs)
        holds[number] = low <= UNDISTURBED <= high
        marked[number] = latency.unsteadiness(runs) is not None
    left = holds[~marked]
    return float(holds.mean()), float(left.mean()) if len(left) else math.nan, float(marked.mean())


HOSTS: dict[str, tuple[Slowdown, int]] = {  # what the host does, and the seed of its rows
    "stays quiet": (quiet, 2),
    "slows down once": (step, 1),
    "is slow for a while in the middle": (slow_middle, 1),
    "becomes slower and slower": (ramp, 1),
    "is slow for 2 to 7 runs, up to four times": (long_bursts, 1),
    "is slow in one run of seven": (short_bursts, 1),
    "is slow every 5 to 40 runs": (periodic, 1),
    "is slow during one process": (one_slow_process, 1),
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path)
    table = []
    out = arguments.parse_args().out
    for host, (slowdown, seed) in HOSTS.items():
        holds, _, marked = simulate(slowdown, processes=3, repeats=3, spread=0.02, seed=seed)
        table.append({"the host": host, "intervals that hold the truth": f"{holds:.1%}", "marked": f"{marked:.1%}"})
    write_json(out, table)


if __name__ == "__main__":
    run(main)
