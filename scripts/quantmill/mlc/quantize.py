"""MLC-LLM's 4-bit group quantization, bit for bit, as comparisons of integers.

As python/mlc_llm/quantization/group_quantization.py has it, 32 weights in a row share a scale, and all arithmetic is
float16 (each operation rounds to nearest even):

    scale = max|w| / 7        q = clip(rint(w / scale + 7), 0, 14), and 0 where w / scale is not a number

numpy's float16 arithmetic is emulated through float32 and slow. But for a given scale q grows with w, so q is the
number of 14 thresholds that w reaches, and float16 numbers compare like the integers of their bits once negative ones
are reversed. The thresholds of every possible max|w| are found with the formula itself.
"""

from functools import cache

import numpy as np

GROUP = 32  # weights that share a scale
LEVELS = 14  # the largest q
SIGN, MAGNITUDE, INFINITY = 0x8000, 0x7FFF, 0x7C00  # of a float16's bits
NEVER = np.int16(-0x8000)  # below every weight: reaches no threshold


def order(bits: np.ndarray) -> np.ndarray:
    """Map uint16 bits of float16 numbers to int16 in the numbers' order; -0 comes just before 0."""
    signed = bits.view(np.int16)
    return signed ^ ((signed >> 15) & MAGNITUDE)


def scales(peaks: np.ndarray) -> np.ndarray:
    """float16 scales of groups with these largest magnitudes (uint16 bits)."""
    return peaks.view(np.float16) / np.float16(7)


@cache
def thresholds() -> np.ndarray:
    """Find the least `order` of a weight whose q is over 0, 1, … 13, for the bits of every max|w|; int16 [14, 31744].

    By bisection with the formula. -65,504 gives 0 whatever the scale, infinity 14.
    """
    scale = scales(np.arange(INFINITY, dtype=np.uint16))
    level = np.arange(1, LEVELS + 1, dtype=np.float16)[:, None]
    below = np.full((LEVELS, INFINITY), -INFINITY, np.int32)
    above = np.full((LEVELS, INFINITY), INFINITY, np.int32)
    with np.errstate(all="ignore"):  # of scale 0
        while (above - below).max() > 1:
            middle = ((above + below) // 2).astype(np.int16)
            reached = np.rint(order(middle.view(np.uint16)).view(np.float16) / scale + np.float16(7)) >= level
            above, below = np.where(reached, middle, above), np.where(reached, below, middle)
    return above.astype(np.int16)


def quantize(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize rows of float16 weights.

    Args:
        weights: uint16 [rows, inputs], their bits.

    Returns:
        uint8 [rows, groups * 16]: what little-endian uint32 words hold, eight weights each, the first in the lowest
        four bits, and zeros beyond the last input; float16 [rows, groups]: the scales.

    Raises ValueError where a weight is infinite or NaN.
    """
    rows, inputs = weights.shape
    groups = -(-inputs // GROUP)
    padding = groups * GROUP - inputs
    if padding:
        weights = np.pad(weights, ((0, 0), (0, padding)))
    # a group a column, so that every operation runs along many groups
    columns = np.ascontiguousarray(weights.reshape(-1, GROUP).T)
    peaks = (columns & MAGNITUDE).max(0)
    if peaks.max(initial=0) >= INFINITY:
        raise ValueError("not finite")
    ordered = order(columns)
    if padding:
        ordered.reshape(GROUP, rows, groups)[-padding:, :, -1] = NEVER
    levels = np.zeros(columns.shape, np.uint8)
    reached = np.empty(columns.shape, np.bool_)
    for threshold in thresholds().take(peaks, axis=1):
        np.greater_equal(ordered, threshold, out=reached)
        levels += reached.view(np.uint8)
    packed = levels[0::2] | levels[1::2] << 4
    return packed.T.reshape(rows, -1), scales(peaks).reshape(rows, groups)
