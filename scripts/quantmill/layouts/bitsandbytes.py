"""bitsandbytes: numbers and their scales for each linear layer [outputs, inputs]; all else as in the source.

Four bits: `weight` holds two numbers a byte, row after row, the upper half first. Each is an index into
`weight.quant_map`; `weight.absmax` multiplies blocks of them. With double quantization absmax are bytes: indexes into
`nested_quant_map`, times `nested_absmax` of larger blocks, plus an offset. Block sizes, the shape, the offset and the
dtype to round to are JSON in `weight.quant_state.bitsandbytes__TYPE`.

int8: `weight` times its row's `SCB` / 127.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.common import bounded_json
from quantmill.layouts import Layer, Reading, Unread, array, quantization, read_layers, step_round

STATE_KEYS = ("blocksize", "nested_blocksize", "nested_offset", "dtype", "shape")
BLOCK_SIZES = tuple(2**power for power in range(5, 13))  # 32 to 4096
STATE = "quant_state.bitsandbytes__"
MAX_STATE = 2**16  # bytes of one; they take 200
OUTLIER = 6.0  # llm_int8_threshold: columns with a larger activation are multiplied without rounding
PARTS = r"SCB|weight_format|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)"


def packed_shapes(words: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """See `layouts`."""
    outputs, inputs = shape
    if words.get("load_in_8bit"):
        return {"weight": (outputs, inputs), "SCB": (outputs,)}
    return {"weight": (-(-outputs * inputs // 2), 1), "weight.quant_map": (16,)}


def check(layer: Layer) -> None:
    """Raise `Unread` if a quant_state contradicts a matrix's scales: the library's kernels believe it, and would read
    beyond their end."""
    if (peaks := layer.tensor("weight.absmax")) is None:
        return
    name, state = layer.matrix.name, _state(layer)
    sizes = [(state.get("blocksize"), layer.matrix.numel, peaks.numel)]
    if nested := layer.tensor("weight.nested_absmax"):
        sizes.append((state.get("nested_blocksize"), peaks.numel, nested.numel))
        table = layer.tensor("weight.nested_quant_map")
        if table is None or table.numel != 256 or peaks.dtype != "U8":
            raise Unread(f"{name} has no table of 256 scales")
    for size, numbers, scales in sizes:
        if type(size) is not int or size not in BLOCK_SIZES or -(-numbers // size) != scales:
            raise Unread(f"{name} has {scales} scales of {size!s:.20} numbers each, and is {numbers} numbers")
    if state.get("shape") != list(layer.matrix.shape):
        raise Unread(f"{name} says that it is {state.get('shape')!s:.60}")


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for a missing or damaged quant_state."""

    def weights(layer: Layer) -> np.ndarray:
        if "SCB" in layer:
            return layer.floats("weight") * (layer.floats("SCB") / 127)[:, None]
        check(layer)
        state, count = _state(layer), layer.matrix.numel
        halves = layer["weight"].reshape(-1)
        places = np.stack([halves >> 4, halves & 15], axis=-1).reshape(-1)[:count]
        peaks = layer["weight.absmax"].reshape(-1)
        if "weight.nested_absmax" in layer:
            outer = np.repeat(layer["weight.nested_absmax"], state["nested_blocksize"])[: len(peaks)]
            peaks = layer["weight.nested_quant_map"][peaks] * outer + np.float32(state["nested_offset"])
        values = layer["weight.quant_map"][places] * np.repeat(peaks, state["blocksize"])[:count]
        return _round_to(values, state.get("dtype")).reshape(layer.matrix.shape)

    return read_layers(artifact, source, ["SCB", "weight.absmax"], weights)


def _state(layer: Layer) -> dict[str, Any]:
    """Return the values of a matrix's quant_state that are used. Raises `Unread` if it is missing, large or damaged."""
    name = layer.matrix.name
    found = next((each for key, each in layer.stored.items() if key.startswith(f"{name}.{STATE}")), None)
    if found and found.nbytes > MAX_STATE:  # before it is read
        raise Unread(f"{found.name} is over {MAX_STATE >> 10} KiB")
    try:
        state = bounded_json.loads(array(found).tobytes() if found else b"", MAX_STATE)
        return {key: state[key] for key in STATE_KEYS if key in state}
    except (ValueError, TypeError):
        raise Unread(f"{name} has no {STATE}TYPE that is JSON") from None


def _round_to(values: np.ndarray, dtype: str | None) -> np.ndarray:
    """Round float32 values to a dtype of torch. Raises `Unread` for one that no model has."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # the upper half, to the nearest and to even
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    raise Unread(f"its weights are of dtype {dtype!r:.40}")


def rounding(artifact: Path) -> Callable[[str, Any], Any] | None:
    """See `layouts`. LLM.int8() rounds each row of activations in steps of 1/127 of its largest value, except columns
    that hold an outlier (arXiv:2208.07339). Four-bit weights are multiplied in floating point."""
    if not quantization(artifact).get("load_in_8bit"):
        return None
    stored = shards.find(artifact).tensors()

    def round_input(layer: str, x: Any) -> Any:
        if f"{layer}.SCB" not in stored:
            return x
        large = x.abs() >= OUTLIER
        whole = large.flatten(0, -2).any(0)
        return x.where(whole, step_round(x.masked_fill(large, 0), 127))

    return round_input
