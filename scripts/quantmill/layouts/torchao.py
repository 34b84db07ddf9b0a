"""torchao's weight-only int8 and float8, as transformers stores them: `_weight_qdata` [outputs, inputs],
`_weight_scale` [outputs, 1] and, of int8, `_weight_zero_point`, which is 0, of each linear layer; all else as in the
source."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint.shards import Checkpoint
from quantmill.layouts import Layer, Reading, Unread, read_layers

# what a quantization_config may name; the library instantiates anything else that its modules hold
INT8 = "Int8WeightOnlyConfig"
KNOWN = {INT8, "Float8WeightOnlyConfig", "PerRow", "torch.dtype"}
PARTS = r"_weight_(qdata|scale|zero_point)"


def packed_shapes(words: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """See `layouts`. Raises `Unread` if the config names other objects than `KNOWN`."""
    unknown = sorted({str(each) for each in types(words)} - KNOWN)
    if unknown:
        raise Unread(f"its config names {unknown[0]!r:.60}")
    return {"_weight_qdata": shape, "_weight_scale": (shape[0], 1)}


def types(content: Any) -> Iterator[Any]:
    """Yield every `_type` in a JSON value."""
    if isinstance(content, Mapping):
        yield from [content["_type"]] if "_type" in content else []
        content = content.values()
    if not isinstance(content, str | int | float | None):
        for each in content:
            yield from types(each)


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`."""

    def weights(layer: Layer) -> np.ndarray:
        numbers = layer.floats("_weight_qdata")
        if "_weight_zero_point" in layer:
            numbers = numbers - layer.floats("_weight_zero_point")
        return numbers * layer.floats("_weight_scale")

    return read_layers(artifact, source, ["_weight_qdata"], weights)
