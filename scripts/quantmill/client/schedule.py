"""Times at which requests are sent: as others end (`Closed`), or fixed whatever the server does (`Open`)."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Closed:
    """Slots, each of which sends its next request when its last has ended. One slot is `serial`."""

    slots: int

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"{self.slots} slots send nothing")


@dataclass(frozen=True)
class Open:
    """Seconds after the start at which each request is to be sent, in order."""

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if any(later < earlier for earlier, later in zip((0.0, *self.times), self.times, strict=False)):
            raise ValueError("times of a schedule are not in order, or before its start")


Load = Closed | Open


def burst(requests: int) -> Open:
    """Return the load that sends all requests at once."""
    return Open((0.0,) * requests)


@dataclass(frozen=True)
class Poisson:
    """A Poisson process of `rate` requests per second: its times as drawn, to a microsecond.

    The times are not rescaled to the rate, because gaps that are forced to their mean are not independent. The same
    seed draws the same gaps for every rate, so that two rates are compared on the same arrivals.
    """

    rate: float
    seed: int
    times: tuple[float, ...]

    @classmethod
    def draw(cls, rate: float, requests: int, seed: int) -> "Poisson":
        """Draw the first `requests` arrivals."""
        gaps = np.random.default_rng(seed).exponential(size=requests) / rate
        return cls(float(rate), seed, tuple(np.cumsum(gaps).round(6).tolist()))

    @property
    def load(self) -> Open:
        """Return the load that sends requests at these times."""
        return Open(self.times)

    @property
    def sha256(self) -> str:
        """Return a hash of rate, seed and times, for results: runs with the same hash had the same arrivals."""
        content = {"rate": self.rate, "seed": self.seed, "times": list(self.times)}
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()
