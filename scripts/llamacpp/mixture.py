"""Which type each tensor gets: the least divergence that fits a number of bytes."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from common.program import UserError

UNITS = 2**17  # in which the budget is counted; a tensor's bytes are rounded up to them


class Option(NamedTuple):
    """What a type makes of a tensor: its bytes, and nats a token of divergence."""

    nbytes: int
    kld: float


def choose(tensors: Mapping[str, Mapping[str, Option]], budget: int) -> dict[str, str]:
    """Tensor -> type, of the options of each, so that all together take at most `budget` bytes and the sum of their
    divergences is least.

    This is the knapsack problem with one choice in each class, by dynamic programming: exact, but for the rounding to
    a unit of the budget. Raises `UserError` where not even the smallest types fit.
    """
    least = sum(min(options.values()).nbytes for options in tensors.values())
    if least > budget:
        raise UserError(f"the smallest types of all tensors take {least} bytes, and {budget} are asked for")
    unit = -(-budget // UNITS)
    best = np.zeros(budget // unit + 1)  # the least divergence of the tensors so far, in so many units
    picks = []  # of each tensor, the option that reaches it
    for options in tensors.values():
        reached, pick = np.full_like(best, np.inf), np.zeros(len(best), np.int8)
        for number, option in enumerate(options.values()):
            units = -(-option.nbytes // unit)
            found = best[: max(0, len(best) - units)] + option.kld
            place = units + np.flatnonzero(found < reached[units:])
            reached[place], pick[place] = found[place - units], number
        best = reached
        picks.append(pick)
    if best[-1] == np.inf:
        return {name: min(options, key=lambda type_: options[type_]) for name, options in tensors.items()}
    chosen, left = {}, len(best) - 1
    for (name, options), pick in zip(reversed(tensors.items()), reversed(picks), strict=True):
        chosen[name] = list(options)[pick[left]]
        left -= -(-options[chosen[name]].nbytes // unit)
    return {name: chosen[name] for name in tensors}
