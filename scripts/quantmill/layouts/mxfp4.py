"""MXFP4, as gpt-oss was published: four-bit floats (e2m1) in groups of 32, of stacked experts.

| tensor | what it holds |
|---|---|
| `NAME_blocks` | uint8 [experts, outputs, groups, 16]: two numbers a byte, that of the lower half first |
| `NAME_scales` | uint8 [experts, outputs, groups]: of a group, the exponent of a power of two, more 127 |

They are the weights `NAME` [experts, inputs, outputs], turned as the model multiplies them (OCP Microscaling 1.0).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError
from quantmill.layouts import array, four_bit_floats
from quantmill.layouts.decoded import AGAIN, PIECE, Decoded, check_shape, make, part

GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
LARGEST = 2**26  # numbers of one expert's matrix, whose bytes are held at once; gpt-oss has 17 million


def describe(words: Mapping[str, Any]) -> str:
    """See `layouts`."""
    return f"MXFP4 in groups of {GROUP}"


def decoded(words: Mapping[str, Any], stored: Mapping[str, Tensor]) -> list[Decoded]:
    """See `layouts`."""
    found = []
    for name, tensor in stored.items():
        if name.endswith(SCALES):
            part(stored, name.removesuffix(SCALES) + BLOCKS, of=name)
        if not name.endswith(BLOCKS):
            continue
        plain = name.removesuffix(BLOCKS)
        scales = part(stored, plain + SCALES, of=name)
        for each, dimensions in ((tensor, 4), (scales, 3)):
            if each.dtype != "U8" or len(each.shape) != dimensions:
                what = f"{each.dtype} {list(each.shape)}"
                raise UserError(
                    f"{each.path}: {each.name} is {what}, where U8 of {dimensions} sizes is expected; {AGAIN}"
                )
        experts, outputs, groups, _ = tensor.shape
        check_shape(tensor, (experts, outputs, groups, GROUP // 2), f"groups of {GROUP} make")
        check_shape(scales, (experts, outputs, groups), f"the groups of {name} make")
        if outputs * groups * GROUP > LARGEST:
            raise UserError(f"{tensor.path}: {name} is {list(tensor.shape)}, larger than any model's expert; refused")
        exponents = replace(scales, dtype="F8_E8M0")
        values = partial(pieces, tensor, exponents)
        found.append(make(plain, (experts, groups * GROUP, outputs), [tensor, scales], exponents, values))
    return found


def pieces(blocks: Tensor, exponents: Tensor) -> Iterator[np.ndarray]:
    """Yield the values of a stack of matrices; see `Decoded`. One expert's bytes are held at a time."""
    experts, outputs, groups, _ = blocks.shape
    step = max(1, PIECE // max(1, GROUP * outputs))
    for index in range(experts):
        halves, scales = array(blocks.plane(index)), array(exponents.plane(index))
        for first in range(0, groups, step):
            last = min(first + step, groups)
            numbers = four_bit_floats(halves[:, first:last]) * scales[:, first:last, None]
            yield numbers.reshape(outputs, -1).T
