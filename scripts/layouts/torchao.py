"""torchao's weight-only int8 and float8, as transformers stores them: of each linear layer `_weight_qdata` [outputs,
inputs] and `_weight_scale` [outputs, 1], and of int8 `_weight_zero_point`, which is 0; all else as it was."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint import shards
from checkpoint.shards import Checkpoint
from checkpoint.tensor import Tensor
from layouts import Reading, Shapes, find


def packed(words: Mapping[str, Any], layer: str, shape: tuple[int, ...]) -> Shapes:
    """See `layouts.Shapes`."""
    return {f"{layer}._weight_qdata": shape, f"{layer}._weight_scale": (shape[0], 1)}


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`."""
    stored = shards.find(artifact).tensors()

    def weights(tensor: Tensor) -> np.ndarray:
        layer = tensor.name.removesuffix(".weight")
        if f"{layer}._weight_qdata" not in stored:
            return find(stored, tensor.name)
        numbers, scales = (find(stored, f"{layer}._weight_{part}").astype(np.float32) for part in ("qdata", "scale"))
        if f"{layer}._weight_zero_point" in stored:
            numbers = numbers - find(stored, f"{layer}._weight_zero_point").astype(np.float32)
        return numbers * scales

    return weights
