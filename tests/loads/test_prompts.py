"""Prompts of a load share nothing that a cache could keep."""

from pathlib import Path

import numpy as np
import pytest

from quantmill.common.program import UserError
from quantmill.loads import prompts

BURST = Path(__file__).parents[2] / "config" / "burst.txt"
KINDS = 6


def test_no_two_prompts_begin_with_the_same_block() -> None:
    """A text that repeats itself: its first half again, and one phrase a hundred times."""
    rng = np.random.default_rng(0)
    half = rng.integers(500, size=1500).tolist()
    ids = [*half, *half, *([7, 8, 9] * 100)]
    lengths = prompts.draw_lengths((20, 300), 200, seed=1)
    cut = prompts.cut_prompts(ids, lengths, seed=2)
    assert [len(prompt) for prompt in cut] == lengths
    for size in (16, 32, 128, 256):
        assert len({tuple(prompt[:size]) for prompt in cut}) == 200
    text = " ".join(map(str, ids))
    assert all(" ".join(map(str, prompt)) in text for prompt in cut)
    assert cut == prompts.cut_prompts(ids, lengths, seed=2) != prompts.cut_prompts(ids, lengths, seed=3)


def test_a_warm_up_shares_nothing_with_loads() -> None:
    ids = np.random.default_rng(0).integers(50, size=3000).tolist()
    measured = prompts.cut_prompts(ids, [64] * 100, seed=1, prefix=[1])
    assert all(prompt[0] == 1 and len(prompt) == 64 for prompt in measured)
    warm = prompts.cut_prompts(ids, [64] * 100, seed=1, prefix=[1], others=measured)
    assert not {tuple(prompt[:16]) for prompt in measured} & {tuple(prompt[:16]) for prompt in warm}


def test_short_prompts_are_not_the_beginning_of_others() -> None:
    ids = np.random.default_rng(0).integers(500, size=3000).tolist()
    cut = prompts.cut_prompts(ids, [5] * 50 + [40] * 50, seed=1)
    assert len({tuple(prompt[:5]) for prompt in cut}) == 100


def test_a_text_that_is_too_short_is_refused() -> None:
    ids = list(range(40))
    with pytest.raises(UserError, match=r"a prompt of 50 tokens is longer than the text \(40\); give a longer text"):
        prompts.cut_prompts(ids, [50], seed=1)
    with pytest.raises(UserError, match="the text of 40 tokens has no 30 prompts that begin differently"):
        prompts.cut_prompts(ids, [20] * 30, seed=1)
    with pytest.raises(UserError, match="a prompt of 1 tokens holds nothing of the text"):
        prompts.cut_prompts(ids, [1], seed=1, prefix=[1])


def test_lengths_are_drawn_once() -> None:
    assert prompts.draw_lengths(23, 3, seed=1) == [23, 23, 23]
    drawn = prompts.draw_lengths((10, 12), 300, seed=1)
    assert drawn == prompts.draw_lengths((10, 12), 300, seed=1)
    assert set(drawn) == {10, 11, 12}


def test_fifty_nine_prompts_of_six_kinds_begin_differently() -> None:
    """Their first 16 bytes differ, and so do the first 16 tokens of whatever tokenizer."""
    kinds = [kind.splitlines() for kind in BURST.read_text(encoding="utf-8").strip().split("\n\n")]
    assert [len(kind) for kind in kinds] == [10] * 5 + [9]
    assert len(kinds) == KINDS
    lines = [line.encode()[:16] for kind in kinds for line in kind]
    assert len(set(lines)) == len(lines) == 59
