"""An engine of numpy alone, with faults and delays to choose."""

import time
import weakref
from collections.abc import Iterator

import numpy as np

from quantmill import engines
from quantmill.engines.head import Head

VOCAB = 11


class Fake(engines.Engine):
    """An engine whose logits are a fixed function of the token before, handed out in chunks of three positions."""

    compute_type, modes, mode = "float32", ("fake",), "fake"

    def __init__(
        self, shift: int = 0, noise: float = 0.0, drop: int = 0, delay: float = 0.0, ahead: float = 0.0
    ) -> None:
        self.table = np.random.default_rng(5).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)
        self.table += noise * np.random.default_rng(6).normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
        self.shift, self.drop, self.delay, self.ahead = shift, drop, delay, ahead
        self.most_alive = 0

    def head(self, ids: list[int]) -> Head:
        return Head(self.table.T)

    def states(self, ids: list[int]) -> Iterator[np.ndarray]:
        """Yield states that hold a 1 at the token's place."""
        yield from np.split(np.eye(VOCAB, dtype=np.float32)[ids], range(3, len(ids), 3))

    def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
        rows = np.roll(self.table[np.array(ids)], self.shift, axis=0)
        handed_out: list[weakref.ref[np.ndarray]] = []
        for low in range(0, len(ids) - self.drop, 3):
            chunk = rows[low : min(low + 3, len(ids) - self.drop)].copy()
            handed_out.append(weakref.ref(chunk))
            self.most_alive = max(self.most_alive, sum(each() is not None for each in handed_out))
            yield chunk
            del chunk

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        for token in range(n - self.drop):
            time.sleep(self.delay)
            for number in range(len(prompts)):
                yield number, token, time.perf_counter() + self.ahead
