"""How long jobs take, from recorded results: the same format, engine and kind of device, between the models measured.

A result of another machine says the order of magnitude. What nothing recorded tells is None.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from quantmill.common import plain_file

MAX_RESULTS = 32 * 2**20  # bytes of a results.json

START = 15.0  # seconds until a process has its libraries and a small model; most of it the import of torch
SERVER_START = 90.0  # seconds until a server of a small model answers, and is warmed up and looked at alone
REQUESTS_A_SLOT = 23  # loading.plan.PER_SLOT
TRIES = 24  # rates that a search for the largest one tries, at most: metrics.goodput.goodput
COMPARE = 3e-9  # seconds a position and token of the vocabulary (docs/PERFORMANCE.md, "Scoring")
BEYOND = 2.0  # times the largest model measured, and the most tokens a quantizer saw, to which figures are stretched

RENAMED = {"mlc": "quantmill-tvm"}  # engines that older results call otherwise


def load_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of results.json files, those that are there, that say what they measured on which device."""
    rows: list[dict[str, Any]] = []
    for file in files:
        if file.is_file():
            rows += json.loads(plain_file.read(file, MAX_RESULTS))["rows"]
    measured = (row for row in rows if row.get("artifact") and row.get("device_details"))
    return [row | {"engine": RENAMED.get(row["engine"], row["engine"])} for row in measured]


def interpolate(points: Iterable[tuple[float, float]], x: float, beyond: float = BEYOND) -> float | None:
    """y at x on the line through the points next to it; in proportion beyond the largest, up to `beyond` times, and
    below the smallest as there. None without points, and farther out."""
    known: dict[float, list[float]] = {}
    for at, value in points:
        known.setdefault(at, []).append(value)
    line = sorted((at, sum(values) / len(values)) for at, values in known.items())
    if not line or x > beyond * line[-1][0]:
        return None
    place = bisect_left(line, (x,))
    if place == 0:
        return line[0][1]
    if place == len(line):
        return line[-1][1] * x / line[-1][0]
    (low, before), (high, after) = line[place - 1 : place + 1]
    return before + (after - before) * (x - low) / (high - low)


def inverse(speed: float | None) -> float | None:
    """Seconds for one where there are so many a second."""
    return 1 / speed if speed else None


class Rates:
    """Times of formats that take about as long by one engine (None: any, for what does not depend on it), on one kind
    of device (`cpu` or `cuda`), for a model of so many weights; figures are stretched `beyond` times the largest model
    measured."""

    def __init__(
        self,
        rows: list[dict[str, Any]],
        device: str,
        formats: tuple[str, ...],
        engine: str | None,
        parameters: int,
        beyond: float = BEYOND,
    ) -> None:
        fitting = [row for row in rows if row["format"] in formats and row["device_details"]["device"] == device]
        self.rows = [row for row in fitting if engine in (None, row["engine"])]
        self.parameters, self.beyond = parameters, beyond

    def estimate(self, values: Iterable[tuple[Mapping[str, Any], float | None]]) -> float | None:
        """What (row, value) pairs come to for this model."""
        points = ((row["artifact"]["parameter_count"], value) for row, value in values if value)
        return interpolate(points, self.parameters, self.beyond)

    def build(self, tokens: int) -> float | None:
        """Seconds to build an artifact, the start of its process with it; `tokens` are what a quantizer is to see."""
        seen = [
            (row, row["artifact"]["parameters"].get("samples"), row["artifact"]["parameters"].get("sequence_length"))
            for row in self.rows
        ]
        fitting = [row for row, samples, length in seen if not samples or tokens <= self.beyond * samples * length]
        seconds = self.estimate((row, row["artifact"]["build_s"]) for row in fitting)
        return None if seconds is None else seconds + START

    def latency(self, protocol: Mapping[str, Any], prompts: int) -> float | None:
        """Seconds of a latency job: every way to decode, in its own processes, over the prompts and a warm-up."""
        tokens = (protocol["repeats"] * prompts + 1) * protocol["new_tokens"]
        ways = [self.estimate((row, inverse(row.get("tokens_per_second"))) for row in self.rows)]
        if protocol["decode"] == "captured":
            others = [(row, mode) for row in self.rows for mode in row.get("other_modes", [])]
            ways += [self.estimate((row, inverse(mode["tokens_per_second"])) for row, mode in others)] if others else []
        if None in ways:
            return None
        return protocol["processes"] * sum(START + tokens * seconds for seconds in ways if seconds)

    def scoring(self, positions: int, vocab: int) -> float | None:
        """Seconds to score a text: its forwards, as fast as prompts of 512 tokens, and the comparison."""
        prompts = [(row, entry) for row in self.rows for entry in row.get("lengths", []) if "ttft_ms_p50" in entry]
        seconds = self.estimate((row, entry["ttft_ms_p50"] / entry["tokens"] / 1000) for row, entry in prompts)
        return None if seconds is None else START + positions * (seconds + vocab * COMPARE)

    def loads(self, loads: Mapping[str, Any]) -> float | None:
        """Seconds of a server under a study's loads, its starts with it. A search for the largest rate counts as all of
        its tries, each as long as its requests take at once."""
        new, requests = fmean(_limits(loads["new_tokens"])), loads["requests"]
        rounds = [(slots, REQUESTS_A_SLOT) for slots in loads["concurrency"]]
        rounds += [(loads["burst"], 1)] if loads["burst"] else []
        rounds += [(requests, TRIES)] if loads["goodput"] else []
        steps, alone = [self.step(users) for users, _ in rounds], self.step(1)
        if alone is None or None in steps:
            return None
        answers = sum(number * new * step for (_, number), step in zip(rounds, steps, strict=True) if step)
        answers += sum(requests / rate + new * alone for rate in loads["rates"])
        return loads["restarts"] * (SERVER_START + answers)

    def step(self, users: int) -> float | None:
        """Seconds until each of so many users has one more token: from the largest batch measured that has no more, and
        in proportion beyond."""
        return self.estimate((row, _step(row, users)) for row in self.rows)


def _limits(length: int | list[int]) -> list[int]:
    return length if isinstance(length, list) else [length]


def _step(row: Mapping[str, Any], users: int) -> float | None:
    fitting = [entry for entry in row.get("batches") or [] if entry["batch"] <= users]
    speed = max(fitting, key=lambda entry: entry["batch"], default=row).get("tokens_per_second")
    return users / speed if speed else None
