"""GPTQ as auto-gptq stores it: qweight, qzeros, scales and g_idx of each linear layer; all else as in the source.

qweight [inputs / 8, outputs] holds eight inputs a word, qzeros [groups, outputs / 8] eight outputs, the lowest four
bits first. g_idx [inputs] is each input's group. A weight is (q - zero) * scale. Zero points are stored less one,
except in the variant `gptq_v2`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint.shards import Checkpoint
from quantmill.common.program import UserError
from quantmill.layouts import Layer, Reading, Unread, array, nibbles, quantization, read_layers

PARTS = r"qweight|qzeros|scales|g_idx"


def packed_shapes(words: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """See `layouts`."""
    outputs, inputs = shape
    bits, group = words["bits"], words.get("group_size", -1)
    groups = -(-inputs // group) if group > 0 else 1
    return {
        "qweight": (inputs * bits // 32, outputs),
        "scales": (groups, outputs),
        "qzeros": (groups, outputs * bits // 32),
    }


def check(layer: Layer) -> None:
    """Raise `UserError` if an input's group is not one of its layer: kernels would read beyond the last scale."""
    order, scales, inputs = layer.tensor("g_idx"), layer.tensor("scales"), layer.matrix.shape[1:]
    if order is None or scales is None or not scales.shape:
        return
    if order.dtype not in ("I32", "I64") or order.shape != inputs:
        raise UserError(
            f"{order.path}: {order.name} is {order.dtype} {list(order.shape)}, where I32 {list(inputs)} is expected, "
            "the group of each input; download it again"
        )
    groups, named = scales.shape[0], array(order)
    if (wrong := named[(named < 0) | (named >= groups)]).size:
        raise UserError(
            f"{order.path}: {order.name} names group {wrong[0]}, and its layer has {groups}; download it again"
        )


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for another number of bits."""
    config = quantization(artifact)
    if config.get("bits") != 4:
        raise Unread(f"{config.get('bits')} bits")
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def weights(layer: Layer) -> np.ndarray:
        outputs, inputs = layer.matrix.shape
        values = nibbles(layer["qweight"]).transpose(0, 2, 1).reshape(-1, outputs)
        zeros, size = layer["qzeros"], config.get("group_size", -1)
        points = nibbles(zeros).reshape(len(zeros), -1)[:, :outputs] + less
        usual = np.arange(inputs) // (size if size > 0 else inputs)  # which some artifacts leave out
        group = usual if layer.tensor("g_idx") is None else layer["g_idx"]
        return ((values - points[group]) * layer.floats("scales")[group]).T

    return read_layers(artifact, source, ["qweight"], weights)
