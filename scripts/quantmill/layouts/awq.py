"""AWQ as autoawq's GEMM stores it: of each linear layer qweight, qzeros and scales; all else as in the source.

qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8] hold eight outputs a word, in the order 0, 2, 4, 6, 1, 3,
5, 7 from the lowest four bits on; a weight is (q - zero) * scale.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.layouts import Reading, Shapes, Unread, find, nibbles, stored_tensors

PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # of each output among a word's nibbles
PARTS = r"qweight|qzeros|scales"  # of a layer: see `layouts`


def packed(words: Mapping[str, Any], layer: str, shape: tuple[int, ...]) -> Shapes:
    """See `layouts.Shapes`."""
    outputs, inputs = shape
    bits, group = words.get("bits", words.get("w_bit")), words.get("group_size", words.get("q_group_size", -1))
    groups = -(-inputs // group) if group > 0 else 1
    return {
        f"{layer}.qweight": (inputs, outputs * bits // 32),
        f"{layer}.scales": (groups, outputs),
        f"{layer}.qzeros": (groups, outputs * bits // 32),
    }


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for another number of bits or another packing."""
    stored = stored_tensors(artifact, source)
    config = shards.read_json(artifact / "config.json")["quantization_config"]
    if config.get("bits", config.get("w_bit")) != 4 or str(config.get("version", "gemm")).lower() != "gemm":
        raise Unread(f"{config.get('bits')} bits, version {config.get('version')}")

    def weights(tensor: Tensor) -> np.ndarray:
        layer = tensor.name.removesuffix(".weight")
        if f"{layer}.qweight" not in stored:
            return find(stored, tensor.name)
        packed, zeros, scales = (find(stored, f"{layer}.{part}") for part in ("qweight", "qzeros", "scales"))
        values, points = (nibbles(words)[..., PLACES].reshape(len(words), -1) for words in (packed, zeros))
        size = len(values) // len(scales)
        return ((values - points.repeat(size, 0)) * scales.astype(np.float32).repeat(size, 0)).T

    return weights
