"""What changed between two runs of a study, figure by figure, and whether that is more than their uncertainty.

Rows are matched by model, format, run and device. A change counts if it is significant and beyond a tolerance:
runs of two days differ by more than the intervals within either know of.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quantmill.metrics import perplexity
from quantmill.report import pareto
from quantmill.report.column import Column
from quantmill.report.columns import COLUMNS
from quantmill.report.labels import key

Row = Mapping[str, Any]
Verdict = Literal["same", "better", "worse", "gone", "new", "disturbed", "incomparable"]

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
    """Whether two rows are of the same cell and device; a row that was not measured has no device."""
    devices = {one["device"], other["device"]} - {None}
    return len(devices) < 2 and key(one) == key(other)


def figures() -> list[Column]:
    """The columns that are compared: what the page shows first comes first."""
    return sorted((column for column in COLUMNS if column.judge), key=lambda column: column.shown or len(COLUMNS))


def changes(before: Row, after: Row, limits: Limits, same_reference: bool = True) -> Iterator[Change]:
    """Every figure that one of two rows has."""
    decoding = difference(before["protocol"]["latency"], after["protocol"]["latency"], DECODING)
    text = quality_difference(before, after)
    obstacles = {"latency": decoding, "quality": text}
    disturbed = not limits.disturbed and bool(interference(before, after))
    for column in figures():
        (part, *_), name = column.parts, column.name
        one, other = before[name], after[name]
        why = obstacles.get(part, "")
        if column.judge == "paired difference" and not same_reference:
            why = why or "another reference"
        if one is None and other is None:
            continue
        if other is None:
            yield Change(name, one, other, "gone", note=after["missing"].get(name, ""))
        elif one is None:
            yield Change(name, one, other, "new")
        elif why:
            yield Change(name, one, other, "incomparable", note=why)
        elif disturbed and part == "latency":
            yield Change(name, one, other, "disturbed")
        else:
            yield judge(column, before, after, limits)


def judge(column: Column, before: Row, after: Row, limits: Limits) -> Change:
    """A figure that both rows have, measured in the same way."""
    amount, low, high, sure = JUDGES[column.judge](column.name, before, after)
    tolerance = {"latency": limits.speed, "quality": limits.quality}.get(column.parts[0], 0.0)
    worse = amount < 0 if column.better == "higher" else amount > 0
    verdict: Verdict = "same" if not sure or abs(amount) <= tolerance else "worse" if worse else "better"
    return Change(column.name, before[column.name], after[column.name], verdict, amount, low, high)


Judgement = tuple[float, float | None, float | None, bool]  # amount, its ends, whether it is more than chance


def judge_interval(name: str, before: Row, after: Row) -> Judgement:
    """A figure with an interval of its own in both rows."""
    amount, low, high = (value - 1 for value in rate_ratio(before, after, name))
    return amount, low, high, not low <= 0 <= high


def judge_paired_ratio(name: str, before: Row, after: Row) -> Judgement:
    """Perplexity, paired by windows."""
    ratio = pareto.perplexity_ratio(after, before)
    return ratio["ratio"] - 1, ratio["low"] - 1, ratio["high"] - 1, not ratio["tie"]


def judge_paired_difference(name: str, before: Row, after: Row) -> Judgement:
    """Divergence in nats, paired by windows."""
    sums = [np.array(row["quality_windows"]["kld"]) for row in (after, before)]
    amount, low, high, tie = perplexity.paired_difference(*sums, np.array(before["quality_windows"]["tokens"]))
    return amount, low, high, not tie


def judge_relative(name: str, before: Row, after: Row) -> Judgement:
    """A figure without a spread: what is exact, and memory, which hardly varies."""
    one, other = before[name], after[name]
    return other / one - 1 if one else float(other != one), None, None, True


def judge_median(name: str, before: Row, after: Row) -> Judgement:
    """A median, which has no interval in results.json: it changed once it left the spread of the other run's raw times,
    the larger one above the 90th percentile of the smaller one's run."""
    small, large = sorted((before, after), key=lambda row: row[name])
    outside = large[name] > small["latency_summary"][name.replace("p50", "p90")]
    return (*judge_relative(name, before, after)[:3], outside)


JUDGES: dict[str | None, Callable[[str, Row, Row], Judgement]] = {
    "interval": judge_interval,
    "median": judge_median,
    "relative": judge_relative,
    "paired ratio": judge_paired_ratio,
    "paired difference": judge_paired_difference,
}


def rate_ratio(before: Row, after: Row, name: str = "tokens_per_second") -> tuple[float, float, float]:
    """A rate after over before, with a 95% interval made of the intervals of the two.

    The distances from each figure to the ends of its interval, as logarithms, add up as roots of sums of squares: the
    runs are independent (method of variance estimates recovery: Zou and Donner, Statistics in Medicine 27, 2008). Both
    decode the same prompts, which each interval counts as chance: this one is rather too wide than too narrow.
    """
    (old, old_low, old_high), (new, new_low, new_high) = (
        [math.log(row[f"{name}{end}"]) for end in ("", "_low", "_high")] for row in (before, after)
    )
    change = new - old
    down, up = math.hypot(new - new_low, old_high - old), math.hypot(new_high - new, old - old_low)
    return math.exp(change), math.exp(change - down), math.exp(change + up)


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
        told = {name: row[name] for name in ("engine", "options", "mode", "compute_type", "threads")}
        told |= {name: device.get(name) for name in ("driver", "power_limit_w", "memory_bytes")}
        facts.append(told | (row["versions"] or {}) | {"tool": artifact.get("tool_version")})
    words = [
        f"{name} {facts[0].get(name)} → {facts[1].get(name)}"
        for name in dict.fromkeys([*facts[0], *facts[1]])
        if facts[0].get(name) != facts[1].get(name)
    ]
    sources = [(row["artifact"] or {}).get("source") for row in (before, after)]
    return words + (["other weights"] if sources[0] != sources[1] else [])
