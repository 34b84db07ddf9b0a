"""Degenerate text: an output that falls into a short cycle of tokens and stays in it (METHODS.md, Degenerate text)."""

from collections.abc import Mapping, Sequence
from typing import Any

PERIOD = 16  # tokens of a cycle, at most
REPEATS = 4  # of a cycle, at least
LENGTH = 32  # tokens of all repeats, at least: a row of dots or a rule of a table is no loop


def find(ids: Sequence[int]) -> tuple[int, int] | None:
    """Where an output falls into a cycle that lasts to its end: the first token in it, from 1, and the cycle's length.

    The shortest cycle that fits is meant; its last repeat may be cut off by the end. None where there is no such cycle.
    """
    for period in range(1, PERIOD + 1):
        start = len(ids) - period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if len(ids) - start >= max(LENGTH, REPEATS * period):
            return start + 1, period
    return None


def of_result(speed: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a row says of the texts of its latency result: how many fall into a loop, of how many, the earliest token
    at which one does, and each loop with its prompt, from 1. `relate` fills in `reference_too`. None where a server
    tells no tokens."""
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
    }


def relate(each: Mapping[str, Any], reference: Mapping[str, Any] | None) -> None:
    """Say of each loop of a row whether its model's reference falls into one after the same prompt as well."""
    mine, theirs = each["degenerate"], reference and reference["degenerate"]
    if not mine or not theirs or mine["of"] != theirs["of"]:
        return
    looped = {loop["prompt"] for loop in theirs["loops"]}
    for loop in mine["loops"]:
        loop["reference_too"] = loop["prompt"] in looped


def own_loops(degenerate: Mapping[str, Any]) -> int:
    """How many loops are not the reference's as well, and so not known to be the model's own habit."""
    return sum(not loop["reference_too"] for loop in degenerate["loops"])
