"""What changed between two runs of a study, figure by figure, and whether that is more than their uncertainty.

Rows are matched by model, format, engine and device. A change counts if it is significant and beyond a tolerance:
runs of two days differ by more than the intervals within either know of.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from metrics import perplexity
from reporting import pareto

Row = Mapping[str, Any]
Verdict = Literal["same", "better", "worse", "gone", "new", "disturbed", "incomparable"]

SPEED = ("tokens_per_second", "ttft_ms_p50", "tpot_ms_p50", "peak_memory_bytes")
QUALITY = ("perplexity", "kld_mean")
SIZE = ("bits_per_weight", "size_bytes")
FIGURES = (*SPEED, *QUALITY, *SIZE)
# of the latency protocol; more repeats or processes measure the same
DECODING = ("batch", "decoding", "prompts_sha256", "new_tokens")
REGRESSIONS = ("worse", "gone")


@dataclass(frozen=True)
class Limits:
    """What nobody minds: `speed` relative, of memory too; `quality` relative of perplexity, and in nats of divergence.

    `disturbed`: judge figures of a disturbed measurement like any other.
    """

    speed: float = 0.05
    quality: float = 0.001
    disturbed: bool = False


@dataclass(frozen=True)
class Change:
    """One figure of a row, before and after. `amount` is relative, of kld_mean in nats; `low`, `high`: its 95% ends.

    `verdict` is `gone` or `new` where one run alone has the figure, `disturbed` where something else ran while one
    of the two was measured, `incomparable` where the two were measured in different ways; `note` says why. These have
    no amount.
    """

    figure: str
    before: float | None
    after: float | None
    verdict: Verdict = "same"
    amount: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Pair:
    """A row of both runs, or of one alone; `differences` is what else is different, such as versions, in words."""

    before: Row | None
    after: Row | None
    changes: Sequence[Change] = ()
    differences: Sequence[str] = ()

    @property
    def row(self) -> Row:
        """The row that is there."""
        return self.after or self.before or {}

    @property
    def interference(self) -> list[str]:
        """What disturbed the speed of either run."""
        return interference(self.before, self.after)


def interference(before: Row | None, after: Row | None) -> list[str]:
    """What disturbed the speed of either row."""
    rows = {"before": before, "after": after}
    return [f"{when}: {reason}" for when, row in rows.items() if row for reason in row["interference"] or []]


def pairs(before: Mapping[str, Any], after: Mapping[str, Any], limits: Limits) -> list[Pair]:
    """All rows of two results.json: those of the first in its order, then those that only the second has; none where
    the two have no device in common."""
    seen = [{row["device"] for row in each["rows"]} - {None} for each in (before, after)]
    if all(seen) and not seen[0] & seen[1]:
        return []
    rest = list(after["rows"])
    found = []
    for one in before["rows"]:
        other = next((row for row in rest if same_cell(one, row)), None)
        if other is None:
            found.append(Pair(one, None))
            continue
        rest.remove(other)
        same_reference = before["config"]["reference"] == after["config"]["reference"]
        found.append(Pair(one, other, list(changes(one, other, limits, same_reference)), differences(one, other)))
    return found + [Pair(None, row) for row in rest]


def same_cell(one: Row, other: Row) -> bool:
    """Whether two rows are of the same model, format, engine and device; a row that was not measured has no device."""
    devices = {one["device"], other["device"]} - {None}
    return len(devices) < 2 and all(one[name] == other[name] for name in ("model", "format", "engine"))


def changes(before: Row, after: Row, limits: Limits, same_reference: bool = True) -> Iterator[Change]:
    """Every figure that one of two rows has."""
    decoding = difference(before["protocol"]["latency"], after["protocol"]["latency"], DECODING)
    text = quality_difference(before, after)
    divergence = text or ("" if same_reference else "another reference")
    disturbed = not limits.disturbed and bool(interference(before, after))
    for name in FIGURES:
        one, other = before[name], after[name]
        why = decoding if name in SPEED else text if name == "perplexity" else divergence if name in QUALITY else ""
        if one is None and other is None:
            continue
        if other is None:
            yield Change(name, one, other, "gone", note=after["missing"].get(name, ""))
        elif one is None:
            yield Change(name, one, other, "new")
        elif why:
            yield Change(name, one, other, "incomparable", note=why)
        elif disturbed and name in SPEED:
            yield Change(name, one, other, "disturbed")
        else:
            yield compared(name, before, after, limits)


def compared(name: str, before: Row, after: Row, limits: Limits) -> Change:
    """A figure that both rows have, measured in the same way."""
    one, other = before[name], after[name]
    low = high = None
    if name == "tokens_per_second":
        amount, low, high = (value - 1 for value in rate_ratio(before, after))
        sure, tolerance = not low <= 0 <= high, limits.speed
    elif name == "perplexity":
        ratio = pareto.perplexity_ratio(after, before)
        amount, low, high = (ratio[key] - 1 for key in ("ratio", "low", "high"))
        sure, tolerance = not ratio["tie"], limits.quality
    elif name == "kld_mean":
        sums = [np.array(row["quality_windows"]["kld"]) for row in (after, before)]
        tokens = np.array(before["quality_windows"]["tokens"])
        amount, low, high, tie = perplexity.paired_difference(*sums, tokens)
        sure, tolerance = not tie, limits.quality
    elif name in SIZE:
        amount, sure, tolerance = other / one - 1 if one else float(other != one), True, 0.0
    else:
        amount, sure, tolerance = (
            other / one - 1 if one else float(other != one),
            beyond(name, before, after),
            limits.speed,
        )
    worse = amount < 0 if name == "tokens_per_second" else amount > 0
    verdict: Verdict = "same" if not sure or abs(amount) <= tolerance else "worse" if worse else "better"
    return Change(name, one, other, verdict, amount, low, high)


def rate_ratio(before: Row, after: Row) -> tuple[float, float, float]:
    """Tokens a second after over before, with a 95% interval made of the intervals of the two.

    The distances from each figure to the ends of its interval, as logarithms, add up as roots of sums of squares: the
    runs are independent (method of variance estimates recovery: Zou and Donner, Statistics in Medicine 27, 2008). Both
    decode the same prompts, which each interval counts as chance: this one is rather too wide than too narrow.
    """
    (old, old_low, old_high), (new, new_low, new_high) = (
        [math.log(row[f"tokens_per_second{end}"]) for end in ("", "_low", "_high")] for row in (before, after)
    )
    change = new - old
    down, up = math.hypot(new - new_low, old_high - old), math.hypot(new_high - new, old - old_low)
    return math.exp(change), math.exp(change - down), math.exp(change + up)


def beyond(name: str, before: Row, after: Row) -> bool:
    """Whether a median left the spread of the other run's raw times: the larger one is above the 90th percentile of the
    smaller one's run. A median has no interval in results.json; memory, which hardly varies, has no spread."""
    if not name.endswith("_p50"):
        return True
    small, large = sorted((before, after), key=lambda row: row[name])
    return large[name] > small["latency_summary"][name.replace("p50", "p90")]


def difference(one: Row | None, other: Row | None, names: Sequence[str]) -> str:
    """The first of `names` by which two protocols differ, in words; empty where none does."""
    if one is None or other is None:
        return ""
    changed = (name for name in names if one.get(name) != other.get(name))
    return next((f"{name}: {one.get(name)} → {other.get(name)}" for name in changed), "")


def quality_difference(before: Row, after: Row) -> str:
    """Why the quality of two rows cannot be paired by windows, in words; empty where it can."""
    one, other = (row["protocol"]["quality"] for row in (before, after))
    if None in (one, other, before["quality_windows"], after["quality_windows"]):
        return "no windows to pair"
    if one["text_sha256"] != other["text_sha256"]:
        return "another evaluation text"
    windows = [[row["quality_windows"][name] for name in ("tokens", "counts")] for row in (before, after)]
    return difference(one, other, sorted({*one, *other})) or ("" if windows[0] == windows[1] else "other windows")


def differences(before: Row, after: Row) -> list[str]:
    """What may explain a change: the way it was decoded, versions, the driver, the weights."""
    facts = []
    for row in (before, after):
        device, artifact = row["device_details"] or {}, row["artifact"] or {}
        told = {name: row[name] for name in ("mode", "compute_type", "threads")}
        told |= {name: device.get(name) for name in ("driver", "power_limit_w", "memory_bytes")}
        facts.append(told | (row["versions"] or {}) | {"tool": artifact.get("tool_version")})
    words = [
        f"{name} {facts[0].get(name)} → {facts[1].get(name)}"
        for name in dict.fromkeys([*facts[0], *facts[1]])
        if facts[0].get(name) != facts[1].get(name)
    ]
    sources = [(row["artifact"] or {}).get("source") for row in (before, after)]
    return words + (["other weights"] if sources[0] != sources[1] else [])
