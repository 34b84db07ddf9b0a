"""Conditions of a measurement (clocks, temperature, energy) and possible interference.

Pure functions of samples and counters, which `gpu_state`, `host_state` and `host_load` read.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from quantmill.devices.host_load import Load

OTHERS = 0.05  # share of all processors' time that others may take; a quiet host's housekeeping takes up to 4%
OTHERS_BESIDE_GPU = 0.5  # with a GPU one thread launches kernels: processors must be free, not quiet
FEWEST_SAMPLES = 5  # fewer samples give no energy

# Reasons of reduced clocks (NVML API reference, nvmlClocksEventReasons)
THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
NORMAL = 0x4  # at full load a board runs at its power limit, in every row


@dataclass(frozen=True)
class Sample:
    """A device, or several that work together, at one moment; a value that is not reported is None.

    `at`: `time.perf_counter()`, which all processes of a machine share. `joules`: since any start. `throttling`: bits
    of `THROTTLING`. `processes`: ids of the processes on each GPU.
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
    """Return the samples from `start` to `end`."""
    return [sample for sample in samples if start <= sample.at <= end]


def facts(samples: Sequence[Sample]) -> dict[str, Any]:
    """Summarise samples for the result file: minimum, median, maximum, and the share of throttled samples."""
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
    """Return times, cumulative joules and their source: the device's counter, or integrated power samples.

    None if the device reports neither, or if there are fewer than `FEWEST_SAMPLES` samples.
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
    """Return the joules of the phases [start, end], and their source; None if unknown."""
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
    """Describe possible interference with a measurement; empty if there was none.

    `before`: other users of the device while no process of ours was there. `most`: the share of the processors' time
    that others may take. `own`: the processes that measured.
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
    """Return the number of other processes on the GPUs.

    If none of ours is among them, the container has another numbering: then one process on each GPU counts as ours.
    """
    every = frozenset().union(*cards)
    ours = every & frozenset(own)
    return len(every - ours) if ours else max((len(card) - 1 for card in cards), default=0)
