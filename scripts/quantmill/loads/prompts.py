"""Prompts of a load, cut from a text's ids: a prefix cache that was left on finds nothing in them."""

from collections.abc import Iterable, Sequence

import numpy as np

from quantmill.common.program import UserError

BLOCK = 16  # tokens of the smallest block that engines cache; prompts that differ in it differ in every larger one
START, STEP = 32, 2  # tokens of a warm-up's answers: until the last prompt is read, and by which they differ

Lengths = int | tuple[int, int]


def draw_lengths(lengths: Lengths, number: int, seed: int) -> list[int]:
    """So many lengths in tokens: all equal, or drawn once between two (both included), the same ones for one seed."""
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
    """A prompt of each length (tokens, with the prefix), from places of the text that are drawn from the seed.

    No two begin with the same `block` tokens, nor does one with those of `others`; a prompt shorter than that is not
    the beginning of another. So no two share a block of any cache whose blocks are at least that large.

    Args:
        prefix: what begins every prompt, such as the beginning of sequence that the model's tokenizer adds.

    Raises:
        UserError: where the text has not so many different beginnings, or is shorter than a prompt.
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
    """New tokens of each request of a burst that warms up every batch size from `largest` down to 1: the requests end
    one after another."""
    return [START + STEP * number for number in range(largest)]
