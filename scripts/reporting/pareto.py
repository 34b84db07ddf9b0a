"""Rows beside each other: a format against its model's reference, and the Pareto front. What intervals say, no more."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metrics import perplexity

# of a row beside its model's reference: None until all rows are there
COMPARED = ("nll_difference", "nll_difference_low", "nll_difference_high", "nll_verdict")


def comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
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
    cannot be compared."""
    if not comparable(candidate, reference):
        return None
    nll, low, high, tie = difference(candidate, reference, "counts")
    return {"ratio": math.exp(nll), "low": math.exp(low), "high": math.exp(high), "tie": tie}


def compare(each: dict[str, Any], reference: Mapping[str, Any] | None) -> None:
    """Set what a row says of itself beside its model's reference."""
    each["perplexity_ratio"] = perplexity_ratio(each, reference) if reference else None
    if each["perplexity_ratio"] is None:
        for name in COMPARED:
            each["missing"].setdefault(name, "nothing to compare it with")
        return
    nll, low, high, tie = difference(each, reference, "tokens")
    verdict = "reference" if each is reference else "tie" if tie else "worse" if nll > 0 else "better"
    each |= dict(zip(COMPARED, (nll, low, high, verdict), strict=True))


def faster(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one row is faster beyond both intervals."""
    return one["tokens_per_second_low"] > other["tokens_per_second_high"]


def better(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one row's perplexity is lower and the paired interval of the ratio leaves 1 out."""
    ratio = perplexity_ratio(one, other)
    return ratio is not None and ratio["high"] < 1


def dominated(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether another row is significantly better in quality or speed, and significantly worse in neither."""
    return any(
        (faster(other, row) or better(other, row)) and not faster(row, other) and not better(row, other)
        for other in others
    )


def mark_pareto(rows: Sequence[dict[str, Any]]) -> None:
    """Set `pareto` of every row with a quality and a speed: true where none of its model and device dominates it."""
    weighed = ("perplexity", "tokens_per_second")
    for each in rows:
        lacks = [name for name in weighed if each[name] is None]
        if lacks:
            each["missing"]["pareto"] = each["missing"][lacks[0]]
            continue
        others = [
            other
            for other in rows
            if other is not each
            and (other["model"], other["device"]) == (each["model"], each["device"])
            and None not in [other[name] for name in weighed]
        ]
        each["pareto"] = not dominated(each, others)
