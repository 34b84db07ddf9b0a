"""torchao's weight-only int8 and float8, as transformers stores them: of each linear layer `_weight_qdata` [outputs,
inputs] and `_weight_scale` [outputs, 1], and of int8 `_weight_zero_point`, which is 0; all else as it was."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.layouts import Reading, Shapes, Unread, find, stored_tensors

# What a quantization_config of these may name. The library makes an object of whatever else its modules hold.
INT8 = "Int8WeightOnlyConfig"
KNOWN = {INT8, "Float8WeightOnlyConfig", "PerRow", "torch.dtype"}
PARTS = r"_weight_(qdata|scale|zero_point)"  # of a layer: see `layouts`


def packed(words: Mapping[str, Any], layer: str, shape: tuple[int, ...]) -> Shapes:
    """See `layouts.Shapes`. Raises `Unread` where the config names other objects than these."""
    unknown = sorted({str(each) for each in types(words)} - KNOWN)
    if unknown:
        raise Unread(f"its config names {unknown[0]!r:.60}")
    return {f"{layer}._weight_qdata": shape, f"{layer}._weight_scale": (shape[0], 1)}


def types(content: Any) -> Iterator[Any]:
    """Every `_type` in a JSON value."""
    if isinstance(content, Mapping):
        yield from [content["_type"]] if "_type" in content else []
        content = content.values()
    if not isinstance(content, str | int | float | None):
        for each in content:
            yield from types(each)


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`."""
    stored = stored_tensors(artifact, source)

    def weights(tensor: Tensor) -> np.ndarray:
        layer = tensor.name.removesuffix(".weight")
        if f"{layer}._weight_qdata" not in stored:
            return find(stored, tensor.name)
        numbers, scales = (find(stored, f"{layer}._weight_{part}").astype(np.float32) for part in ("qdata", "scale"))
        if f"{layer}._weight_zero_point" in stored:
            numbers = numbers - find(stored, f"{layer}._weight_zero_point").astype(np.float32)
        return numbers * scales

    return weights
