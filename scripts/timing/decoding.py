"""Decode a fixed number of tokens and say when each came. What cannot be is refused: its times do not count."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import engines
from common.program import UserError


class Timed(NamedTuple):
    """Tokens of one run; `start` is `time.perf_counter()` when the prompt was handed over, `seconds` count from it."""

    start: float
    tokens: list[int]
    seconds: list[float]

    def raw(self) -> dict[str, float | list[float]]:
        """What the result file keeps."""
        return {"start": round(self.start, 7), "token_seconds": [round(second, 7) for second in self.seconds]}

    def decode_phase(self) -> tuple[float, float]:
        """When the first token was there and when the last."""
        return self.start + self.seconds[0], self.start + self.seconds[-1]


def timed_tokens(engine: engines.Engine, ids: list[int], n: int) -> Timed:
    """Decode n tokens after `ids`. Raises `UserError` unless n came, at times that can be."""
    start = time.perf_counter()
    stamped = list(engine.prefill_decode(ids, n))
    end = time.perf_counter()
    if len(stamped) != n:
        raise UserError(f"the engine returned {len(stamped)} tokens where {n} were asked for: its times do not count")
    stamps = [at for _, at in stamped]
    check_stamps([start, *stamps, end])
    return Timed(start, [token for token, _ in stamped], [at - start for at in stamps])


def timed_batch(engine: engines.Engine, prompts: list[list[int]], n: int) -> Timed:
    """Decode n tokens after each of `prompts` together; times are those of steps, tokens those of all, step by step.

    Raises `UserError` unless every prompt got n, at times that can be.
    """
    start = time.perf_counter()
    steps = list(engine.decode_batch(prompts, n))
    end = time.perf_counter()
    tokens = [token for step, _ in steps for token in step]
    if len(steps) != n or any(len(step) != len(prompts) for step, _ in steps):
        raise UserError(
            f"the engine returned {len(tokens)} tokens in {len(steps)} steps where {n} for each of {len(prompts)} "
            "prompts were asked for: its times do not count"
        )
    stamps = [at for _, at in steps]
    check_stamps([start, *stamps, end])
    return Timed(start, tokens, [at - start for at in stamps])


def check_stamps(stamps: Sequence[float]) -> None:
    """Raises `UserError` where a time lies before the one before it."""
    if any(later < earlier for earlier, later in pairwise(stamps)):
        raise UserError("the engine stamped its tokens with times that cannot be: its times do not count")
