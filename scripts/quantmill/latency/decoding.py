"""Decode a fixed number of tokens, and report when each arrived. Impossible times are an error."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from quantmill.common.program import UserError
from quantmill.engines import Engine


class Timing(NamedTuple):
    """Tokens of one run, step by step.

    `start` is `time.perf_counter()` when the engine got the prompts, or when they were sent to a server. `seconds` is
    when the last token of each step arrived, counted from `start`.
    """

    start: float
    tokens: list[int]
    seconds: list[float]

    def raw(self) -> dict[str, float | list[float]]:
        """Return the part that the result file keeps."""
        return {"start": round(self.start, 7), "token_seconds": [round(second, 7) for second in self.seconds]}

    def decode_phase(self) -> tuple[float, float]:
        """Return the times of the first token and the last."""
        return self.start + self.seconds[0], self.start + self.seconds[-1]


def time_tokens(engine: Engine, prompts: Sequence[list[int]], n: int) -> Timing:
    """Decode n tokens after each of `prompts`, all together. Raises `UserError` for another number of tokens, and for
    times that go backwards."""
    start = time.perf_counter()
    came = list(engine.decode(list(prompts), n))
    end = time.perf_counter()
    start = engine.sent or start
    sequences = [[(token, at) for number, token, at in came if number == place] for place in range(len(prompts))]
    if len(came) != n * len(prompts) or any(len(sequence) != n for sequence in sequences):
        asked = f"{n} for each of {len(prompts)} prompts" if len(prompts) > 1 else n
        raise UserError(f"the engine returned {len(came)} tokens where {asked} were asked for; latency discarded")
    for sequence in sequences:
        stamps = [start, *(at for _, at in sequence), end]
        if stamps != sorted(stamps):
            raise UserError("token timestamps go backwards; latency discarded")
    steps = list(zip(*sequences, strict=True))
    tokens = [token for step in steps for token, _ in step]
    return Timing(start, tokens, [max(at for _, at in step) - start for step in steps])
