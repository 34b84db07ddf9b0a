"""The arithmetic of q4f16_1 by integers, against numpy's float16: one number at a time, and all numbers there are."""

import math

import naive_writer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from quantmill.mlc.quantize import INFINITY, LEVELS, MAGNITUDE, order, quantize, thresholds

EVERY = np.arange(2**16, dtype=np.uint16)


def one_by_one(row: np.ndarray) -> tuple[list[int], list[np.float16]]:
    """Return the levels and the scales of a row of float16, each step on single numbers."""
    levels, scales = [], []
    for start in range(0, len(row), 32):
        group = row[start : start + 32]
        scale = max(abs(weight) for weight in group) / np.float16(7)
        assert isinstance(scale, np.float16)
        scales.append(scale)
        for weight in group:
            with np.errstate(all="ignore"):
                scaled = weight / scale + np.float16(7)
            assert isinstance(scaled, np.float16)
            number = float(scaled)
            levels.append(0 if math.isnan(number) else int(min(14, max(0, round(max(-1, min(99, number)))))))
        levels += [0] * (32 - len(group))
    return levels, scales


@given(
    npst.arrays(
        np.uint16,
        st.tuples(st.integers(1, 3), st.integers(1, 70)),
        elements=st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7FFF < 0x7C00),
    )
)
def test_any_weights_as_one_number_at_a_time(bits: np.ndarray) -> None:
    packed, scales = quantize(bits)
    for row, words, found in zip(bits, packed, scales, strict=True):
        levels, expected = one_by_one(row.view(np.float16))
        assert [int(byte) >> shift & 15 for byte in words for shift in (0, 4)] == levels
        assert found.tobytes() == np.array(expected, np.float16).tobytes()


def peaks() -> list[int]:
    """List the bits of the largest magnitudes to try: the smallest (subnormal), the largest, and many between."""
    spread = np.random.default_rng(0).integers(0, INFINITY, 500).tolist()
    return [*range(64), *range(1020, 1030), *spread, *range(INFINITY - 8, INFINITY)]


def test_every_weight_there_is_under_many_scales() -> None:
    for peak in peaks():
        weights = EVERY[np.less_equal(EVERY & MAGNITUDE, peak)]
        groups = np.full((-(-len(weights) // 31), 32), peak, np.uint16)  # each holds the peak, and 31 others
        groups[:, 1:] = np.resize(weights, (len(groups), 31))
        words, scales = naive_writer.quantize(groups.view(np.float16))
        packed, found = quantize(groups)
        assert packed.tobytes() == words.tobytes(), peak
        assert found.tobytes() == scales.tobytes(), peak


def test_levels_by_hand() -> None:
    """A maximum of 7 makes the scale 1: whole numbers are levels, and halves go to the even one."""
    row = np.zeros((1, 32), np.float16)
    row[0, :11] = [7, -7, 0, 1, -1, 0.5, 1.5, -0.5, -1.5, 2.5, -0.0]
    packed, scales = quantize(row.view(np.uint16))
    assert scales.tolist() == [[1.0]]
    levels = [int(byte) >> shift & 15 for byte in packed[0] for shift in (0, 4)]
    assert levels == [14, 0, 7, 8, 6, 8, 8, 6, 6, 10, 7] + [7] * 21


def test_a_group_of_zeros_has_level_and_scale_zero() -> None:
    packed, scales = quantize(np.zeros((2, 40), np.uint16))
    assert not packed.any()
    assert not scales.any()


def test_a_scale_that_vanishes_sends_weights_to_the_ends() -> None:
    row = np.zeros((1, 32), np.uint16)
    row[0, :3] = [3, 0x8003, 1]  # 3/7 of the smallest number there is rounds to nothing
    packed, scales = quantize(row)
    assert (packed[0, 0], packed[0, 1]) == (0x0E, 0x0E)
    assert not packed[0, 2:].any()
    assert not scales.any()


def test_positions_beyond_the_last_input_hold_zero() -> None:
    packed, scales = quantize(np.full((3, 33), 0x3C00, np.uint16))
    assert packed.shape == (3, 32)
    assert (packed[:, :16] == 0xEE).all()
    assert (packed[:, 16] == 0x0E).all()
    assert not packed[:, 17:].any()
    assert scales.shape == (3, 2)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF])
def test_what_is_not_finite_is_refused(bits: int) -> None:
    row = np.zeros((1, 64), np.uint16)
    row[0, 63] = bits
    with pytest.raises(ValueError, match="not finite"):
        quantize(row)


def test_order_is_that_of_the_numbers() -> None:
    finite = EVERY[(EVERY & MAGNITUDE) <= INFINITY]
    by_bits = finite[np.argsort(order(finite))].view(np.float16)
    assert (np.diff(by_bits.astype(np.float64)) >= 0).all()
    assert order(np.array([0x8000, 0], np.uint16)).tolist() == [-1, 0]


def test_thresholds_rise_and_half_are_negative() -> None:
    found = thresholds().astype(int)
    assert found.shape == (LEVELS, INFINITY)
    assert (np.diff(found, axis=0) >= 0).all()
    assert (found[:7, 8:] < 0).all()
    assert (found[7:, 8:] > 0).all()
