"""GPTQ as auto-gptq stores it: of each linear layer qweight, qzeros, scales and g_idx; all else as in the source.

qweight [inputs / 8, outputs] holds eight inputs a word, qzeros [groups, outputs / 8] eight outputs, the lowest four
bits first; g_idx [inputs] says each input's group. A weight is (q - zero) * scale. The zero point is stored less one,
but in the variant `gptq_v2`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint import shards
from checkpoint.shards import Checkpoint
from checkpoint.tensor import Tensor
from layouts import Reading, Shapes, Unread, find, nibbles, stored_tensors

PARTS = r"qweight|qzeros|scales|g_idx"  # of a layer: see `layouts`


def packed(words: Mapping[str, Any], layer: str, shape: tuple[int, ...]) -> Shapes:
    """See `layouts.Shapes`."""
    outputs, inputs = shape
    bits, group = words["bits"], words.get("group_size", -1)
    groups = -(-inputs // group) if group > 0 else 1
    return {f"{layer}.qweight": (inputs * bits // 32, outputs), f"{layer}.scales": (groups, outputs)}


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
        group = find(stored, f"{layer}.g_idx")
        return ((values - points[group]) * scales.astype(np.float32)[group]).T

    return weights
