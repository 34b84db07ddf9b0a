"""A language model that is a table: what follows depends on all ids before it, and every log-probability is known."""

import math
from functools import lru_cache

VOCAB = 48
EOS, BOS = 0, 1
WORDS = ["", *(f" w{number}" if number % 5 else f" é{chr(0x65E5 + number)}" for number in range(1, VOCAB))]
MASK = 2**64 - 1
SPREAD = 8.0  # nats between the likeliest and the least likely logit, at most


class Model:
    """Logits are a hash of the ids so far; `seed` makes another model."""

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed

    def state(self, ids: list[int], before: int | None = None) -> int:
        """Hash ids, starting from the hash of earlier ones."""
        state = self.seed if before is None else before
        for token in ids:
            state = (state * 6364136223846793005 + 1442695040888963407 * (token + 1)) & MASK
        return state

    def logits(self, state: int) -> list[float]:
        """Logits [VOCAB] after the ids of that state."""
        return _logits(state)

    def row(self, state: int) -> list[float]:
        """Log-probabilities [VOCAB]."""
        logits = self.logits(state)
        total = math.log(sum(map(math.exp, logits)))
        return [each - total for each in logits]

    def choose(self, state: int, rank: int = 0) -> int:
        """Return the likeliest token except EOS, or the one of another rank."""
        logits = self.logits(state)
        return sorted(range(1, VOCAB), key=logits.__getitem__)[-1 - rank]

    def decode(self, prompt: list[int], n: int) -> list[int]:
        """Return n tokens, each the likeliest."""
        state, found = self.state(prompt), []
        for _ in range(n):
            found.append(self.choose(state))
            state = self.state(found[-1:], state)
        return found

    def behind(self, prompt: list[int], ids: list[int]) -> list[float]:
        """Return the nats by which each token is behind the likeliest one at its position."""
        state, found = self.state(prompt), []
        for token in ids:
            logits = self.logits(state)
            found.append(max(logits[1:]) - logits[token])
            state = self.state([token], state)
        return found

    def rows(self, ids: list[int]) -> list[list[float]]:
        """Log-probabilities [len(ids) - 1, VOCAB] after each id but the last."""
        return [self.row(self.state(ids[: place + 1])) for place in range(len(ids) - 1)]


@lru_cache(2**16)
def _logits(state: int) -> list[float]:
    return [SPREAD * _noise(state, token) for token in range(VOCAB)]


def _noise(state: int, number: int) -> float:
    """Return a number between 0 and 1."""
    mixed = ((state ^ (number * 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93) & MASK
    mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & MASK
    return (mixed >> 11) / 2**53


def text(ids: list[int]) -> str:
    """Return the text of ids."""
    return "".join(WORDS[token] for token in ids)


def tokenize(words: str) -> list[int]:
    """Return the ids of a text that `text` wrote."""
    return [WORDS.index(f" {word}") for word in words.split()]
