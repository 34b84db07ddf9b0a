"""Compare rows: each with its model's reference, and all of a device on a Pareto front. Intervals decide, no more."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from quantmill.metrics import perplexity
from quantmill.report import caveats, deployed, repetition
from quantmill.report.labels import label
from quantmill.report.rows import Ratio, Row, value_of

# set of a row beside its model's reference, when all rows are there
PAIRED = ("nll_difference", "nll_difference_low", "nll_difference_high", "nll_verdict")
ALL_DISTURBED = "every speed was disturbed while it was measured, so none is ranked; measure them again"
OPEN = "its speed was disturbed, so it is a lower bound, and leaves open whether it is on the front: as measured, "
UNCHECKED = "its artifact was not checked against its own weights, so it is not compared"


def difference(one: Row, other: Row, figure: str, per: str) -> tuple[float, float, float, bool] | None:
    """Return how much a row's `figure` exceeds another's, as sums of windows over that of `per`, with its paired 95%
    interval and whether that holds 0; None unless both were scored on the same windows of the same text."""
    mine, theirs, protocols = one["quality_windows"], other["quality_windows"], (one["protocol"], other["protocol"])
    texts = {each["quality"]["text_sha256"] for each in protocols if each["quality"]}
    if mine is None or theirs is None or mine["tokens"] != theirs["tokens"] or len(texts) != 1:
        return None
    return perplexity.paired_difference(
        np.array(value_of(mine, figure)), np.array(value_of(theirs, figure)), np.array(value_of(mine, per))
    )


def perplexity_ratio(candidate: Row, reference: Row) -> Ratio | None:
    """Return one row's perplexity over another's; None if the two cannot be paired."""
    if (found := difference(candidate, reference, "nll", "counts")) is None:
        return None
    nll, low, high, tie = found
    return {"ratio": math.exp(nll), "low": math.exp(low), "high": math.exp(high), "tie": tie}


def relate(each: Row, reference: Row | None) -> None:
    """Set what a row says of itself beside its model's reference, its loops too."""
    repetition.relate(each, reference)
    found = reference and difference(each, reference, "nll", "tokens")
    each["perplexity_ratio"] = perplexity_ratio(each, reference) if reference else None
    if not found:
        for name in PAIRED:
            each["missing"].setdefault(name, "nothing to compare it with")
        return
    nll, low, high, tie = found
    tie = tie or each["above_noise_floor"] is False  # no further than the same weights in another arithmetic
    each["nll_difference"], each["nll_difference_low"], each["nll_difference_high"] = nll, low, high
    each["nll_verdict"] = "reference" if each is reference else "tie" if tie else "worse" if nll > 0 else "better"


def speed_order(one: Row, other: Row) -> int:
    """Return 1 if one row was faster beyond both intervals, -1 if the other was, else 0."""
    mine, theirs = deployed.speed(one), deployed.speed(other)
    if mine is None or theirs is None:
        return 0
    return (mine[1] > theirs[2]) - (theirs[1] > mine[2])


def quality_order(one: Row, other: Row) -> int:
    """Return 1 if one row's perplexity is lower and the paired interval of the ratio leaves 1 out, -1 if the other's
    is, else 0, also if neither diverges beyond the noise of the arithmetic (a reference does not from itself)."""
    ratio = perplexity_ratio(one, other)
    if ratio is None or ratio["tie"] or one["above_noise_floor"] is other["above_noise_floor"] is False:
        return 0
    return 1 if ratio["ratio"] < 1 else -1


def mark_pareto(rows: Sequence[Row]) -> None:
    """Set `pareto` and `dominated_by` of every checked row with a quality and a deployed speed.

    A row is dominated by the rows of its model and device that are significantly better in one of the two and
    significantly worse in neither. A disturbance only slows: a disturbed row that wins as measured wins, and whether
    one that loses is on the front stays open. An artifact that was not checked may be another model: it has no place.
    """
    groups: dict[tuple[str, str | None], list[Row]] = {}
    for each in rows:
        each["pareto"] = each["dominated_by"] = None
        each["missing"].pop("pareto", None)
        if each["perplexity"] is None:
            each["missing"]["pareto"] = each["missing"]["perplexity"]
        elif each["deployed_tokens_per_second"] is None:
            each["missing"]["pareto"] = each["missing"]["deployed_tokens_per_second"]
        elif reason := caveats.unchecked(each):
            each["missing"]["pareto"] = f"{UNCHECKED}: {reason}"
        else:
            groups.setdefault((each["model"], each["device"]), []).append(each)
    for group in groups.values():
        winners: list[list[str]] = [[] for _ in group]
        for (i, one), (j, other) in combinations(enumerate(group), 2):
            signs = {speed_order(one, other), quality_order(one, other)} - {0}
            if signs == {1}:
                winners[j].append(label(one))
            elif signs == {-1}:
                winners[i].append(label(other))
        known = any(not each["interference"] for each in group)
        for each, names in zip(group, winners, strict=True):
            if not known:
                each["missing"]["pareto"] = ALL_DISTURBED
            elif names and each["interference"]:
                each["missing"]["pareto"] = f"{OPEN}{', '.join(names)} would dominate it; measure it again"
            else:
                each["pareto"], each["dominated_by"] = not names, names
