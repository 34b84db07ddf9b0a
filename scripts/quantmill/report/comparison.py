"""Changes between two runs of a study, figure by figure, and whether they exceed the uncertainty.

Rows are matched by model, format, run and device. A change counts if it is significant and beyond a tolerance:
runs of two days differ by more than the intervals within either contain.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantmill.report import pareto
from quantmill.report.column import Column
from quantmill.report.columns import COLUMNS
from quantmill.report.labels import key
from quantmill.report.rows import Results, Row, value_of

Verdict = Literal["same", "better", "worse", "gone", "new", "disturbed", "incomparable"]

# of the latency protocol; more repeats or processes measure the same
DECODING = ("batch", "decoding", "prompts_sha256", "new_tokens")
NO_WINDOWS = "no windows to pair"
REGRESSIONS: tuple[Verdict, ...] = ("worse", "gone")


@dataclass(frozen=True)
class Limits:
    """Tolerated changes: `speed` relative, of memory too; `quality` relative of perplexity, and in nats of divergence.

    `disturbed`: judge figures of a disturbed measurement like any other.
    """

    speed: float = 0.05
    quality: float = 0.001
    disturbed: bool = False


@dataclass(frozen=True)
class Change:
    """One figure of a row, before and after. `amount` is relative, of kld_mean in nats; `low`, `high`: its 95% ends.

    `verdict` is `gone` or `new` if only one run has the figure, `disturbed` if something else ran while one of the two
    was measured, `incomparable` if the two were measured in different ways; `note` says why. These have no amount.
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
    """A row of both runs, or of one alone; `differences`: other differences, such as versions, in words."""

    row: Row  # after, or the only one
    before: Row | None
    after: Row | None
    changes: Sequence[Change] = ()
    differences: Sequence[str] = ()

    @property
    def interference(self) -> list[str]:
        """Reasons that disturbed the speed of either run."""
        rows = {"before": self.before, "after": self.after}
        return [f"{when}: {reason}" for when, row in rows.items() if row for reason in row["interference"] or []]


def pairs(before: Results, after: Results, limits: Limits) -> list[Pair]:
    """Pair the rows of two results.json: those of the first in its order, then those of the second alone.

    None if the two have no device in common.
    """
    seen = [{row["device"] for row in each["rows"]} - {None} for each in (before, after)]
    if all(seen) and not seen[0] & seen[1]:
        return []
    same_reference = before["config"]["reference"] == after["config"]["reference"]
    rest = list(after["rows"])
    found = []
    for one in before["rows"]:
        # a row that was not measured has no device
        same = (row for row in rest if key(row) == key(one) and len({one["device"], row["device"]} - {None}) < 2)
        if (other := next(same, None)) is None:
            found.append(Pair(one, one, None))
            continue
        rest.remove(other)
        changed = list(changes(one, other, limits, same_reference))
        found.append(Pair(other, one, other, changed, differences(one, other)))
    return found + [Pair(row, None, row) for row in rest]


def figures() -> list[Column]:
    """Return the columns that are compared, in the page's order."""
    return sorted((column for column in COLUMNS if column.judge), key=lambda column: column.shown or len(COLUMNS))


def changes(before: Row, after: Row, limits: Limits, same_reference: bool = True) -> Iterator[Change]:
    """Yield the change of every figure that one of two rows has."""
    decoding = difference(before["protocol"]["latency"], after["protocol"]["latency"], DECODING)
    obstacles = {"latency": decoding, "quality": quality_difference(before, after)}
    disturbed = not limits.disturbed and any(row["interference"] for row in (before, after))
    for column in figures():
        (part, *_), name = column.parts, column.name
        one, other = value_of(before, name), value_of(after, name)
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
        elif (judged := JUDGES[column.judge](name, before, after)) is None:
            yield Change(name, one, other, "incomparable", note=NO_WINDOWS)
        else:
            amount, low, high, sure = judged
            tolerance = {"latency": limits.speed, "quality": limits.quality}.get(part, 0.0)
            worse = amount < 0 if column.better == "higher" else amount > 0
            verdict: Verdict = "same" if not sure or abs(amount) <= tolerance else "worse" if worse else "better"
            yield Change(name, one, other, verdict, amount, low, high)


Judgement = tuple[float, float | None, float | None, bool]  # amount, its ends, whether it is more than chance


def judge_interval(name: str, before: Row, after: Row) -> Judgement:
    """Judge a figure with an interval of its own in both rows."""
    amount, low, high = (value - 1 for value in rate_ratio(before, after, name))
    return amount, low, high, not low <= 0 <= high


def judge_paired_ratio(name: str, before: Row, after: Row) -> Judgement | None:
    """Judge the perplexity, paired by windows."""
    ratio = pareto.perplexity_ratio(after, before)
    return ratio and (ratio["ratio"] - 1, ratio["low"] - 1, ratio["high"] - 1, not ratio["tie"])


def judge_paired_difference(name: str, before: Row, after: Row) -> Judgement | None:
    """Judge the divergence in nats, paired by windows."""
    found = pareto.difference(after, before, "kld", "tokens")
    return found and (*found[:3], not found[3])


def judge_relative(name: str, before: Row, after: Row) -> Judgement:
    """Judge a figure without a spread: what is exact, and memory, which hardly varies."""
    one, other = value_of(before, name), value_of(after, name)
    return other / one - 1 if one else float(other != one), None, None, True


def judge_median(name: str, before: Row, after: Row) -> Judgement:
    """Judge a median, which has no interval in results.json: it changed if it left the spread of the other run's raw
    times, the larger one above the 90th percentile of the smaller one's run."""
    small, large = sorted((before, after), key=lambda row: value_of(row, name))
    outside = value_of(large, name) > (small["latency_summary"] or {})[name.replace("p50", "p90")]
    return (*judge_relative(name, before, after)[:3], outside)


JUDGES: dict[str | None, Callable[[str, Row, Row], Judgement | None]] = {
    "interval": judge_interval,
    "median": judge_median,
    "relative": judge_relative,
    "paired ratio": judge_paired_ratio,
    "paired difference": judge_paired_difference,
}


def rate_ratio(before: Row, after: Row, name: str = "tokens_per_second") -> tuple[float, float, float]:
    """Return a rate after over before, with a 95% interval made of the intervals of the two.

    The distances from each figure to the ends of its interval, as logarithms, add up as roots of sums of squares: the
    runs are independent (method of variance estimates recovery: Zou and Donner, Statistics in Medicine 27, 2008). Both
    decode the same prompts, which each interval counts as chance: this one is too wide rather than too narrow.
    """
    (old, old_low, old_high), (new, new_low, new_high) = (
        [math.log(value_of(row, f"{name}{end}")) for end in ("", "_low", "_high")] for row in (before, after)
    )
    change = new - old
    down, up = math.hypot(new - new_low, old_high - old), math.hypot(new_high - new, old - old_low)
    return math.exp(change), math.exp(change - down), math.exp(change + up)


def difference(one: dict[str, Any] | None, other: dict[str, Any] | None, names: Sequence[str]) -> str:
    """Describe the first of `names` by which two protocols differ; empty if none does."""
    if one is None or other is None:
        return ""
    changed = (name for name in names if one.get(name) != other.get(name))
    return next((f"{name}: {one.get(name)} → {other.get(name)}" for name in changed), "")


def quality_difference(before: Row, after: Row) -> str:
    """Describe why the quality of two rows cannot be paired by windows; empty if it can."""
    one, other = before["protocol"]["quality"], after["protocol"]["quality"]
    old, new = before["quality_windows"], after["quality_windows"]
    if one is None or other is None or old is None or new is None:
        return NO_WINDOWS
    if one["text_sha256"] != other["text_sha256"]:
        return "another evaluation text"
    same = (old["tokens"], old["counts"]) == (new["tokens"], new["counts"])
    return difference(one, other, sorted({*one, *other})) or ("" if same else "other windows")


def differences(before: Row, after: Row) -> list[str]:
    """Describe what may explain a change: the way it was decoded, versions, the driver, the weights."""
    facts: list[dict[str, Any]] = []
    for row in (before, after):
        device, artifact = row["device_details"] or {}, row["artifact"] or {}
        told = {name: value_of(row, name) for name in ("engine", "options", "mode", "compute_type", "threads")}
        told |= {name: device.get(name) for name in ("driver", "power_limit_w", "memory_bytes")}
        facts.append(told | (row["versions"] or {}) | {"tool": artifact.get("tool_version")})
    words = [
        f"{name} {facts[0].get(name)} → {facts[1].get(name)}"
        for name in dict.fromkeys([*facts[0], *facts[1]])
        if facts[0].get(name) != facts[1].get(name)
    ]
    sources = [(row["artifact"] or {}).get("source") for row in (before, after)]
    return words + (["other weights"] if sources[0] != sources[1] else [])
