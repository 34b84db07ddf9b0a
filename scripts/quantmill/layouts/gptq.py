"""GPTQ as auto-gptq stores it: of each linear layer qweight, qzeros, scales and g_idx; all else as in the source.

qweight [inputs / 8, outputs] holds eight inputs a word, qzeros [groups, outputs / 8] eight outputs, the lowest four
bits first; g_idx [inputs] says each input's group. A weight is (q - zero) * scale. The zero point is stored less one,
but in the variant `gptq_v2`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError
from quantmill.layouts import Reading, Shapes, Unread, array, find, nibbles, stored_tensors

PARTS = r"qweight|qzeros|scales|g_idx"  # of a layer: see `layouts`


def packed(words: Mapping[str, Any], layer: str, shape: tuple[int, ...]) -> Shapes:
    """See `layouts.Shapes`."""
    outputs, inputs = shape
    bits, group = words["bits"], words.get("group_size", -1)
    groups = -(-inputs // group) if group > 0 else 1
    return {
        f"{layer}.qweight": (inputs * bits // 32, outputs),
        f"{layer}.scales": (groups, outputs),
        f"{layer}.qzeros": (groups, outputs * bits // 32),
    }


def check(stored: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    """Raises `UserError` where an input's group is none of its layer's: kernels would read a scale beyond their end."""
    layer = name.removesuffix(".weight")
    order, scales = stored.get(f"{layer}.g_idx"), stored.get(f"{layer}.scales")
    if order is None or scales is None or not scales.shape:
        return
    if order.dtype not in ("I32", "I64") or order.shape != shape[1:]:
        raise UserError(
            f"{order.path}: {order.name} is {order.dtype} {list(order.shape)}, where I32 {list(shape[1:])} is due, the "
            "group of each input; download it again"
        )
    groups, named = scales.shape[0], array(order)
    if (wrong := named[(named < 0) | (named >= groups)]).size:
        raise UserError(
            f"{order.path}: {order.name} names group {wrong[0]}, and its layer has {groups}; download it again"
        )


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for another number of bits."""
    stored = stored_tensors(artifact, source)
    config = shards.read_json(artifact / "config.json")["quantization_config"]
    if config.get("bits") != 4:
        raise Unread(f"{config.get('bits')} bits")
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def weights(tensor: Tensor) -> np.ndarray:
        layer = tensor.name.removesuffix(".weight")
        if f"{layer}.qweight" not in stored:
            return find(stored, tensor.name)
        packed, zeros, scales = (find(stored, f"{layer}.{part}") for part in ("qweight", "qzeros", "scales"))
        outputs = packed.shape[1]
        values = nibbles(packed).transpose(0, 2, 1).reshape(-1, outputs)
        points = nibbles(zeros).reshape(len(zeros), -1)[:, :outputs] + less
        inputs, size = tensor.shape[1], config.get("group_size", -1)
        named = f"{layer}.g_idx" in stored  # some leave the usual order out
        group = find(stored, f"{layer}.g_idx") if named else np.arange(inputs) // (size if size > 0 else inputs)
        return ((values - points[group]) * scales.astype(np.float32)[group]).T

    return weights
