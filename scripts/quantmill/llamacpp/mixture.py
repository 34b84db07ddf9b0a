"""Choice of each tensor's type: the least divergence that fits a number of bytes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quantmill.common.program import UserError

UNITS = 2**17  # in which a budget is counted; a tensor's bytes are rounded up to them


class Choice(NamedTuple):
    """A type for a tensor: the bytes it takes, and the divergence that it causes, in nats a token."""

    type: str
    nbytes: int
    kld: float


def choose(tensors: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """Choose a type for each tensor, so that all take at most `budget` bytes and the sum of divergences is least.

    This is the multiple-choice knapsack problem, solved by dynamic programming: exact up to rounding to units of the
    budget. Raises `UserError` if even the smallest types do not fit.
    """
    least = sum(min(choice.nbytes for choice in choices) for choices in tensors.values())
    if least > budget:
        raise UserError(
            f"the smallest types of all tensors take {least:,} bytes, and {max(0, budget):,} are left for them; allow "
            "a larger file"
        )
    unit = -(-budget // UNITS)
    best = np.zeros(budget // unit + 1)  # by units: the least divergence of the tensors so far
    picks = []  # for each tensor, the choice that reaches it
    for choices in tensors.values():
        reached, pick = np.full_like(best, np.inf), np.zeros(len(best), np.int8)
        for number, choice in enumerate(choices):
            units = -(-choice.nbytes // unit)
            found = best[: max(0, len(best) - units)] + choice.kld
            place = units + np.flatnonzero(found < reached[units:])
            reached[place], pick[place] = found[place - units], number
        best = reached
        picks.append(pick)
    if best[-1] == np.inf:  # the smallest types fit only without rounding
        return {name: min(choices, key=lambda choice: choice.nbytes) for name, choices in tensors.items()}
    chosen, left = {}, len(best) - 1
    for (name, choices), pick in zip(reversed([*tensors.items()]), reversed(picks), strict=True):
        chosen[name] = choices[pick[left]]
        left -= -(-chosen[name].nbytes // unit)
    return {name: chosen[name] for name in tensors}
