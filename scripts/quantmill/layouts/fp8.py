"""Float8 (e4m3) in blocks, as DeepSeek-V3 and Qwen3 were published; transformers calls it `fp8`.

| tensor | what it holds |
|---|---|
| `NAME`, mostly a layer's `weight` | float8 [outputs, inputs], or [experts, outputs, inputs] |
| `NAME_scale_inv` | [rows of blocks, columns of blocks], of each expert; it multiplies the weights of a block |

`weight_block_size` of the config is the size of a block, mostly [128, 128]; the last block of a row or column may be
cut. Without it a tensor has one scale. Scales are floats, or powers of two (e8m0).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError
from quantmill.layouts import Unread, array, spread
from quantmill.layouts.decoded import AGAIN, Decoded, blocks, check_shape, is_power_of_two, make, matrix_pieces, part

FLOAT8, SUFFIX = "F8_E4M3", "_scale_inv"


def block_size(words: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size of a block; None for a scale for each tensor. Raises `Unread` for a size that is not in powers of
    two."""
    size = words.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(map(is_power_of_two, size)):
        raise Unread(f"its weight_block_size is {size!r:.60}, where two powers of two are expected")
    return size[0], size[1]


def describe(words: Mapping[str, Any]) -> str:
    """See `layouts`."""
    size = block_size(words)
    return f"float8 in blocks of {size[0]} x {size[1]}" if size else "float8 with a scale for each tensor"


def decoded(words: Mapping[str, Any], stored: Mapping[str, Tensor]) -> list[Decoded]:
    """See `layouts`."""
    size, found = block_size(words), []
    for name, tensor in stored.items():
        of = name.removesuffix(SUFFIX)
        if of != name and (of not in stored or stored[of].dtype != FLOAT8):
            what = f"{of} is {stored[of].dtype if of in stored else 'missing'}"
            raise UserError(f"{tensor.path}: {name} scales {FLOAT8}, and {what}; {AGAIN}")
        if tensor.dtype == FLOAT8:
            scales = part(stored, name + SUFFIX, of=name)
            found.append(make(name, tensor.shape, [tensor, scales], scales, partial(pieces, tensor, scales, size)))
            check(tensor, scales, size)
    return found


def check(tensor: Tensor, scales: Tensor, size: tuple[int, int] | None) -> None:
    """Raise `UserError` if a tensor is not a matrix, or a stack of some, with a scale for each block."""
    shape = tensor.shape
    if len(shape) not in (2, 3):
        raise UserError(f"{tensor.path}: {tensor.name} is {list(shape)}, and float8 is read of matrices; refused")
    if size or scales.numel != 1:
        what = f"blocks of {size[0]} x {size[1]}" if size else "one scale"
        check_shape(
            scales, (*shape[:-2], *blocks(shape, size or (shape[-2], shape[-1]))), f"{what} of {list(shape)} make"
        )


def pieces(tensor: Tensor, scales: Tensor, size: tuple[int, int] | None) -> Iterator[np.ndarray]:
    """Yield a tensor's values; see `Decoded`."""
    shape = tensor.shape[-2], tensor.shape[-1]
    block = size or shape

    def rows(numbers: Tensor, factors: Tensor, first: int, last: int) -> np.ndarray:
        of_rows = array(factors.rows(first // block[0], -(-last // block[0])))
        return array(numbers.rows(first, last)) * spread(of_rows, block, (last - first, shape[1]), first)

    if scales.numel == 1:  # of all experts too
        scales = replace(scales, shape=(1, 1), stride=(1, 1))
    for index in range(tensor.shape[0] if len(tensor.shape) == 3 else 1):
        matrix = tensor.plane(index) if len(tensor.shape) == 3 else tensor
        factors = scales.plane(index) if len(scales.shape) == 3 else scales
        yield from matrix_pieces(shape, partial(rows, matrix, factors))
