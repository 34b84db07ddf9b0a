"""HQQ with groups along the inputs (axis 1), in safetensors: `W_q`, `scale`, `zero` and sizes of each linear layer; all
else as in the source.

A matrix [outputs, inputs] is cut, row after row, into groups of `group_size`. W_q uint8 [groups / 2, group_size] holds
the first half of the groups in its upper four bits and the second half in the lower ones. A weight is (q - zero) *
scale, with a float zero for each group.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint.shards import Checkpoint
from quantmill.layouts import Layer, Reading, Unread, read_layers

PARTS = (
    r"W_q|nbits|group_size|shape|scale|zero|axis|packing|unpack_view_dtype|view_as_float|quant_scale|quant_zero|"
    r"compute_dtype|offload_meta|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero"
)


def packed_shapes(words: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """See `layouts`. Raises `Unread` if the config does not give the groups' size."""
    try:
        size = words["quant_config"]["weight_quant_params"]["group_size"]
        groups = shape[0] * shape[1] // size
    except (KeyError, TypeError, ZeroDivisionError):
        raise Unread("its config does not name a group_size") from None
    return {"W_q": (groups // 2, size), "scale": (groups, 1), "zero": (groups, 1)}


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for other bits, and for groups along the outputs."""

    def weights(layer: Layer) -> np.ndarray:
        bits, axis = int(layer["nbits"]), int(layer["axis"])
        if (bits, axis) != (4, 1):
            raise Unread(f"{layer.name}: {bits} bits along axis {axis}")
        halves = layer["W_q"]
        numbers = np.concatenate([halves >> 4, halves & 15]).astype(np.float32)
        return ((numbers - layer.floats("zero")) * layer.floats("scale")).reshape(layer.matrix.shape)

    return read_layers(artifact, source, ["W_q"], weights)
