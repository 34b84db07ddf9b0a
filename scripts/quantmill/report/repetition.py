"""Degenerate text: an output that falls into a short cycle of tokens and stays in it (METHODS.md, Degenerate text)."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmill.metrics import flips
from quantmill.report.rows import Degenerate, Row

PERIOD = 16  # tokens of a cycle, at most
REPEATS = 4  # of a cycle, at least
LENGTH = 32  # tokens of all repeats, at least: a row of dots or a rule of a table is not a loop


def find(ids: Sequence[int]) -> tuple[int, int] | None:
    """Return where an output falls into a cycle that lasts to its end: its first token, from 1, and its length.

    The shortest cycle that fits is meant; the end may cut its last repeat off. None without such a cycle.
    """
    for period in range(1, PERIOD + 1):
        start = len(ids) - period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if len(ids) - start >= max(LENGTH, REPEATS * period):
            return start + 1, period
    return None


def of_result(speed: Mapping[str, Any]) -> Degenerate | None:
    """Return which texts of a latency result fall into a loop; None if a server reports no tokens.

    `relate` compares them with the reference's.
    """
    outputs = [prompt["output_ids"] for prompt in speed["prompts"]]
    if not any(outputs):
        return None
    found = [(number, *each) for number, ids in enumerate(outputs, 1) if (each := find(ids))]
    return {
        "prompts": len(found),
        "of": len(outputs),
        "first_token": min((token for _, token, _ in found), default=None),
        "loops": [
            {"prompt": number, "token": token, "period": period, "reference_too": None}
            for number, token, period in found
        ],
        "reference": None,
    }


def relate(each: Row, reference: Row | None) -> None:
    """Compare a row's loops with those of its model's reference after the same prompts."""
    mine, theirs = each["degenerate"], reference and reference["degenerate"]
    if not mine or not theirs or mine["of"] != theirs["of"]:
        return
    looped = {loop["prompt"] for loop in theirs["loops"]}
    for loop in mine["loops"]:
        loop["reference_too"] = loop["prompt"] in looped
    both = sum(loop["prompt"] in looped for loop in mine["loops"])
    low, high = flips.interval(mine["prompts"] - both, theirs["prompts"] - both, mine["of"])
    mine["reference"] = {"prompts": theirs["prompts"], "difference_low": low, "difference_high": high}
