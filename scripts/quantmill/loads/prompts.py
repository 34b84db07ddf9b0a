"""Prompts of a load, cut from the ids of a text so that a prefix cache that is still on finds nothing in them."""

from collections.abc import Iterable, Sequence

import numpy as np

from quantmill.common.program import UserError

BLOCK = 16  # tokens of the smallest block that engines cache; larger blocks differ if it differs
START, STEP = 32, 2  # tokens of a warm-up's answers: the shortest, which outlasts all prompts, and the difference


def draw_lengths(lengths: int | Sequence[int], number: int, seed: int) -> list[int]:
    """Return lengths in tokens: all equal, or drawn between two (both included). The seed determines them."""
    if isinstance(lengths, int):
        return [lengths] * number
    low, high = lengths
    return np.random.default_rng(seed).integers(low, high + 1, size=number).tolist()


def cut_prompts(
    ids: Sequence[int],
    lengths: Sequence[int],
    *,
    seed: int,
    prefix: Sequence[int] = (),
    block: int = BLOCK,
    others: Iterable[Sequence[int]] = (),
) -> list[list[int]]:
    """Cut a prompt of each length (tokens, with the prefix) from random places of the text.

    No two prompts begin with the same `block` tokens, nor does one begin as one of `others`. A shorter prompt never
    begins another. So no two share a block of any cache whose blocks are at least that large.

    Args:
        prefix: ids that begin every prompt, such as the tokenizer's beginning of sequence.

    Raises:
        UserError: if the text is shorter than a prompt, or has too few different beginnings.
    """
    prefix = list(prefix)
    longest = max(lengths, default=0)
    if min(lengths, default=longest) <= len(prefix):
        raise UserError(f"a prompt of {min(lengths)} tokens holds nothing of the text; ask for longer prompts")
    if longest - len(prefix) > len(ids):
        raise UserError(f"a prompt of {longest} tokens is longer than the text ({len(ids)}); give a longer text")
    block = min(block, *lengths) if lengths else block
    seen = {tuple(other[:block]) for other in others}
    starts = iter(np.random.default_rng(seed).permutation(len(ids)).tolist())
    prompts = []
    for length in lengths:
        for start in starts:
            prompt = [*prefix, *ids[start : start + length - len(prefix)]]
            first = tuple(prompt[:block])
            if len(prompt) == length and first not in seen:
                seen.add(first)
                prompts.append(prompt)
                break
        else:
            few = f"the text of {len(ids)} tokens has no {len(lengths)} prompts that begin differently"
            raise UserError(f"{few}; give a longer text")
    return prompts


def warm_up_lengths(largest: int) -> list[int]:
    """Return the new tokens of a burst whose requests end one after another, so that every batch size from `largest`
    down to 1 is warmed up."""
    return [START + STEP * number for number in range(largest)]
