"""Rows beside each other: a row against its model's reference, and the Pareto front. What intervals say, no more."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from quantmill.metrics import perplexity
from quantmill.report import caveats
from quantmill.report.labels import label

# set of a row beside its model's reference, when all rows are there
PAIRED = ("nll_difference", "nll_difference_low", "nll_difference_high", "nll_verdict")


def share_windows(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows have a quality, of the same windows of the same text."""
    windows = [row["quality_windows"] for row in (one, other)]
    if None in windows or windows[0]["tokens"] != windows[1]["tokens"]:
        return False
    texts = {row["protocol"]["quality"]["text_sha256"] for row in (one, other)}
    return len(texts) == 1


def difference(candidate: Mapping[str, Any], reference: Mapping[str, Any], unit: str) -> tuple[float, ...]:
    """NLL of one row less that of another, for each of `unit` (`tokens`, or `counts`: what the headline divides by),
    with its paired 95% interval and whether that holds 0."""
    one, other = candidate["quality_windows"], reference["quality_windows"]
    return perplexity.paired_difference(np.array(one["nll"]), np.array(other["nll"]), np.array(one[unit]))


def perplexity_ratio(candidate: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any] | None:
    """Perplexity of one row over another's with its paired 95% interval; `tie` where that holds 1. None where the two
    cannot be paired."""
    if not share_windows(candidate, reference):
        return None
    nll, low, high, tie = difference(candidate, reference, "counts")
    return {"ratio": math.exp(nll), "low": math.exp(low), "high": math.exp(high), "tie": tie}


def relate(each: dict[str, Any], reference: Mapping[str, Any] | None) -> None:
    """Set what a row says of itself beside its model's reference."""
    each["perplexity_ratio"] = perplexity_ratio(each, reference) if reference else None
    if each["perplexity_ratio"] is None:
        for name in PAIRED:
            each["missing"].setdefault(name, "nothing to compare it with")
        return
    nll, low, high, tie = difference(each, reference, "tokens")
    tie = tie or each["above_noise_floor"] is False  # no further than the same weights in another arithmetic
    verdict = "reference" if each is reference else "tie" if tie else "worse" if nll > 0 else "better"
    each |= dict(zip(PAIRED, (nll, low, high, verdict), strict=True))


def speed_order(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """1 where one row is faster beyond both intervals, -1 where the other is, else 0."""
    if one["tokens_per_second_low"] > other["tokens_per_second_high"]:
        return 1
    return -1 if other["tokens_per_second_low"] > one["tokens_per_second_high"] else 0


def quality_order(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """1 where one row's perplexity is lower and the paired interval of the ratio leaves 1 out, -1 where the other's is,
    else 0, also where neither diverges beyond the noise of the arithmetic (a reference does not from itself)."""
    ratio = perplexity_ratio(one, other)
    if ratio is None or ratio["tie"] or one["above_noise_floor"] is other["above_noise_floor"] is False:
        return 0
    return 1 if ratio["ratio"] < 1 else -1


DISTURBED = "its speed was disturbed while it was measured, so it is not compared; measure it again"
UNCHECKED = "its artifact was not checked against its own weights, so it is not compared"


def mark_pareto(rows: Sequence[dict[str, Any]]) -> None:
    """Set `pareto` and `dominated_by` of every checked row with a quality and an undisturbed speed: dominated by the
    other rows of its model and device that are significantly better in one of them and significantly worse in neither.

    A disturbed speed says too little, and an artifact that was not checked may be another model: such a row has no
    place, neither on the front nor behind it, and dominates none.
    """
    weighed = ("perplexity", "tokens_per_second")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in rows:
        lacks = [name for name in weighed if each[name] is None]
        if lacks:
            each["missing"]["pareto"] = each["missing"][lacks[0]]
        elif each["interference"]:
            each["missing"]["pareto"] = DISTURBED
        elif reason := caveats.unchecked(each):
            each["missing"]["pareto"] = f"{UNCHECKED}: {reason}"
        else:
            each |= {"pareto": True, "dominated_by": []}
            groups.setdefault((each["model"], each["device"]), []).append(each)
    for group in groups.values():
        for one, other in combinations(group, 2):
            signs = {speed_order(one, other), quality_order(one, other)} - {0}
            if len(signs) == 1:
                winner, loser = (one, other) if signs == {1} else (other, one)
                loser["pareto"] = False
                loser["dominated_by"].append(label(winner))
