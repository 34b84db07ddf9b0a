"""How long a job may take, in minutes, from its model's shape: a limit to ask a cluster for, not a prediction.

Times are the repository's recorded ones (planning.rates) of the same format, or of one like it, on the same kind of
device, in proportion to the weights beyond the largest model measured. A job asks for `SAFETY` times as much, and for
`LEAST` at least: the cluster's machine is another one. With device `auto` it asks as with `cuda`.
"""

from collections.abc import Mapping
from functools import cache
from math import ceil, inf
from pathlib import Path
from typing import Any

from planning.rates import COMPARE, START, Rates, recorded
from planning.shape import Shape

SAFETY = 4  # times what was recorded: an older card, fewer cores, a slow file system
LEAST = 30  # minutes: libraries read over a network, a kernel compiled for the first time
STREAM = 50e6  # bytes a second that a job reads or writes, at least
PREFILL = 3.2e-11  # seconds a token and weight on a CPU, where nothing was recorded: 138M weights, 2 cores
GATE = 12 * 2048  # positions that the gate scores, at most: 8 windows by the engine, 2 or 4 by transformers
FORWARDS = {"gptq-int4": 4, "autogptq-int4": 4, "awq-int4": 25}  # of the samples; awq tries 20 scales a layer
FAMILIES = (
    ("gptq-int4", "awq-int4", "autogptq-int4"),
    ("ct2-float16", "ct2-float32"),
)  # formats that take about as long
RECORDED = ("results/demo/results.json", "results/h200/results.json")


@cache
def rows() -> list[dict[str, Any]]:
    """The rows recorded in this repository."""
    return recorded(Path(__file__).parents[2] / name for name in RECORDED)


def rates(format: str, model: Shape, device: str) -> Rates:
    """Times of a format; one of which nothing was recorded counts as fp16."""
    family = next((names for names in FAMILIES if format in names), (format,))
    kind = "cpu" if device == "cpu" else "cuda"
    found = Rates(rows(), kind, family, model.parameters, inf)
    return found if found.rows else Rates(rows(), kind, "fp16", model.parameters, inf)


def limit(seconds: float) -> int:
    """Minutes that a job asks for, of so many seconds as it would take where it was measured."""
    return max(LEAST, ceil(SAFETY * seconds / 60))


def forward(model: Shape, device: str, tokens: int) -> float:
    """Seconds of a forward over a text of so many tokens, as fast as fp16 reads prompts."""
    whole = rates("fp16", model, device).scoring(tokens, 0)
    return PREFILL * model.parameters * tokens if whole is None else whole - START


def scoring(model: Shape, device: str, positions: int, formats: int = 1) -> int:
    """Minutes to score so many positions of a text by one format, or as many that run beside each other."""
    return limit(formats * (START + forward(model, device, positions)) + positions * model.vocab * COMPARE)


def latency(format: str, model: Shape, device: str, protocol: Mapping[str, Any], prompts: int) -> int:
    """Minutes of a latency job, in which a longer prompt and a batch of whatever size count as a prompt each."""
    further = len(protocol["prompt_tokens"]) + len(protocol["batch_sizes"])
    return limit(rates(format, model, device).latency(protocol, prompts + further))


def build(format: str, model: Shape, device: str, gated: bool, calibration: Mapping[str, int]) -> int:
    """Minutes to read weights and write an artifact, with the forwards of its samples where it is calibrated, and to
    score what the gate does."""
    seconds = rates(format, model, device).build(0) + 4 * model.parameters / STREAM
    samples = FORWARDS.get(format, 0) * calibration["samples"] * calibration["sequence_length"]
    return limit(seconds + forward(model, device, samples + (GATE if gated else 0)))
