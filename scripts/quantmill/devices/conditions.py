"""What a measurement ran under: clocks, temperature, energy, and what may have disturbed it.

Pure functions over samples and counts; where those come from is `gpu_state`'s and `host_load`'s business.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from quantmill.devices.host_load import Load

OTHERS = 0.05  # of the time of all processors that we may use; a quiet host's own housekeeping takes up to 4%
OTHERS_BESIDE_GPU = 0.5  # there one thread launches kernels: processors must be free, not quiet
FEWEST_SAMPLES = 5  # a counter that was read less often tells no energy

# Reasons why a GPU holds its clocks back (NVML API reference, nvmlClocksEventReasons)
THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
NORMAL = 0x4  # at full load a board runs at its power limit: a fact of the device, and the same for every row


@dataclass(frozen=True)
class Sample:
    """A device, or several that work together, at one moment; None where they do not tell.

    `at` is `time.perf_counter()`, which all processes of a machine share; `joules` counts from any start; `throttling`
    are bits of `THROTTLING`, `processes` the ids of those that hold each card.
    """

    at: float
    joules: float | None = None
    watts: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    celsius: float | None = None
    used_bytes: int | None = None
    throttling: int = 0
    processes: tuple[frozenset[int], ...] | None = None


def select(samples: Iterable[Sample], start: float, end: float) -> list[Sample]:
    """The samples of a time."""
    return [sample for sample in samples if start <= sample.at <= end]


def facts(samples: Sequence[Sample]) -> dict[str, Any]:
    """Least, median and most of what was sampled, and how often the clocks were held back, for the result file."""
    found: dict[str, Any] = {"samples": len(samples)}
    for name in ("clock_mhz", "memory_clock_mhz", "celsius", "watts", "used_bytes"):
        values = [value for sample in samples if (value := getattr(sample, name)) is not None]
        if values:
            found[name] = {"min": min(values), "median": median(values), "max": max(values)}
    for bit, name in THROTTLING.items():
        often = sum(bool(sample.throttling & bit) for sample in samples)
        if often:
            found.setdefault("throttling", {})[name] = often / len(samples)
    return found


def energy(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, str] | None:
    """Times, joules up to each, and how they were found: the device's counter, else power samples summed up.

    None where the device tells neither, or was sampled less than `FEWEST_SAMPLES` times.
    """
    for name, source in (("joules", "energy counter"), ("watts", "power samples")):
        known = [(sample.at, value) for sample in samples if (value := getattr(sample, name)) is not None]
        if len(known) >= FEWEST_SAMPLES:
            at, values = np.array(known).T
            if name == "watts":  # trapezoids
                values = np.concatenate([[0], np.cumsum(np.diff(at) * (values[1:] + values[:-1]) / 2)])
            return at, values, source
    return None


def decode_joules(samples: Sequence[Sample], phases: Sequence[tuple[float, float]]) -> tuple[float, str] | None:
    """Joules that the device took in phases [start, end] of time, and how they were found; None where it is unknown."""
    if not phases:
        return None
    margin = 1.0  # so that the first and the last phase have samples on both sides
    found = energy(select(samples, phases[0][0] - margin, phases[-1][1] + margin))
    inside = select(samples, phases[0][0], phases[-1][1])
    if found is None or len(inside) < FEWEST_SAMPLES:
        return None
    at, joules, source = found
    starts, ends = np.array(phases).T
    return float((np.interp(ends, at, joules) - np.interp(starts, at, joules)).sum()), source


def interference(
    load: Load | None,
    samples: Sequence[Sample],
    before: Sequence[str] = (),
    most: float = OTHERS,
    own: Collection[int] = (),
) -> list[str]:
    """What may have disturbed a measurement, in words; empty where nothing did.

    `before` is what was found on the device when none of our processes was there; `most` the share of the processors'
    time that others may take; `own` the processes that measured.
    """
    reasons = list(before)
    if load is not None and load.others + load.stolen > most:
        words = [f"other programs took {load.others:.0%}"] if load.others >= 0.005 else []
        words += [f"the hypervisor {'' if words else 'took '}{load.stolen:.0%}"] if load.stolen >= 0.005 else []
        reasons.append(f"{' and '.join(words)} of the processors' time")
    if load is not None and load.quota_stops:
        reasons.append(f"the container's CPU quota stopped it {load.quota_stops} times")
    if load is not None and load.heat_stops:
        reasons.append("the processor slowed down for heat")
    for bit, name in THROTTLING.items():
        often = sum(bool(sample.throttling & bit) for sample in samples)
        if often and bit != NORMAL:
            reasons.append(f"the GPU held its clocks back: {name} in {often} of {len(samples)} samples")
    others = max((count_others(sample.processes or (), own) for sample in samples), default=0)
    if others > 0:
        reasons.append(f"{others} other process{'es' if others > 1 else ''} on the GPU meanwhile")
    return reasons


def count_others(cards: Sequence[frozenset[int]], own: Collection[int]) -> int:
    """How many processes hold cards beside our own. Where none of ours is among them, the container counts processes by
    other numbers: then one on each card is taken for ours."""
    every = frozenset().union(*cards)
    ours = every & frozenset(own)
    return len(every - ours) if ours else max((len(card) - 1 for card in cards), default=0)
