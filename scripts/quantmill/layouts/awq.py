"""AWQ as autoawq's GEMM stores it: qweight, qzeros and scales of each linear layer; all else as in the source.

qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8] hold eight outputs a word, in the order 0, 2, 4, 6, 1, 3,
5, 7 from the lowest four bits on. A weight is (q - zero) * scale.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint.shards import Checkpoint
from quantmill.layouts import Layer, Reading, Unread, nibbles, quantization, read_layers

PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # of each output among a word's nibbles
PARTS = r"qweight|qzeros|scales"


def packed_shapes(words: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """See `layouts`."""
    outputs, inputs = shape
    bits, group = words.get("bits", words.get("w_bit")), words.get("group_size", words.get("q_group_size", -1))
    groups, width = -(-inputs // group) if group > 0 else 1, outputs * bits // 32
    return {"qweight": (inputs, width), "scales": (groups, outputs), "qzeros": (groups, width)}


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for another number of bits or another packing."""
    config = quantization(artifact)
    if config.get("bits", config.get("w_bit")) != 4 or str(config.get("version", "gemm")).lower() != "gemm":
        raise Unread(f"{config.get('bits')} bits, version {config.get('version')}")

    def weights(layer: Layer) -> np.ndarray:
        packed = layer["qweight"], layer["qzeros"]
        values, points = (nibbles(words)[..., PLACES].reshape(len(words), -1) for words in packed)
        scales = layer.floats("scales")
        size = len(values) // len(scales)
        return ((values - points.repeat(size, 0)) * scales.repeat(size, 0)).T

    return read_layers(artifact, source, ["qweight"], weights)
