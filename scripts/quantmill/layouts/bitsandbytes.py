"""bitsandbytes: of each linear layer [outputs, inputs] numbers and what scales them; all else as it was.

Four bits: `weight` holds two numbers a byte, row after row, the upper half first, each the place of a value in
`weight.quant_map`; `weight.absmax` multiplies blocks of them. With double quantization absmax are bytes themselves:
places in `nested_quant_map`, times `nested_absmax` of larger blocks, plus an offset. What is no tensor (block sizes,
the shape, the offset, the dtype that a weight is rounded to) is JSON in `weight.quant_state.bitsandbytes__TYPE`.

int8: `weight` times its row's `SCB` / 127.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common import bounded_json
from quantmill.layouts import Reading, Shapes, Unread, find, stored_tensors

STATE_KEYS = ("blocksize", "nested_blocksize", "nested_offset", "dtype", "shape")
BLOCK_SIZES = tuple(2**power for power in range(5, 13))  # 32 to 4096
STATE = "quant_state.bitsandbytes__"
MAX_STATE = 2**16  # bytes of one; they take 200
OUTLIER = 6.0  # llm_int8_threshold: columns with a larger activation are multiplied without rounding
# of a layer: see `layouts`
PARTS = r"SCB|weight_format|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)"


def packed(words: Mapping[str, Any], layer: str, shape: tuple[int, ...]) -> Shapes:
    """See `layouts.Shapes`."""
    outputs, inputs = shape
    if words.get("load_in_8bit"):
        return {f"{layer}.weight": (outputs, inputs), f"{layer}.SCB": (outputs,)}
    return {f"{layer}.weight": (-(-outputs * inputs // 2), 1), f"{layer}.weight.quant_map": (16,)}


def check(stored: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    """Raises `Unread` where what a quant_state says of a matrix is not what its scales are: the library's kernels go by
    it, beyond the end of them."""
    if f"{name}.absmax" not in stored:
        return
    state, blocks = _state(stored, name), stored[f"{name}.absmax"].numel
    sizes = [(state.get("blocksize"), math.prod(shape), blocks)]
    if f"{name}.nested_absmax" in stored:
        sizes.append((state.get("nested_blocksize"), blocks, stored[f"{name}.nested_absmax"].numel))
        table = stored.get(f"{name}.nested_quant_map")
        if table is None or table.numel != 256 or stored[f"{name}.absmax"].dtype != "U8":
            raise Unread(f"{name} has no table of 256 scales")
    for size, numbers, scales in sizes:
        if type(size) is not int or size not in BLOCK_SIZES or -(-numbers // size) != scales:
            raise Unread(f"{name} has {scales} scales of {size!s:.20} numbers each, and is {numbers} numbers")
    if state.get("shape") != list(shape):
        raise Unread(f"{name} says that it is {state.get('shape')!s:.60}")


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` where a layer's quant_state is not as above."""
    stored = stored_tensors(artifact, source)

    def weights(tensor: Tensor) -> np.ndarray:
        layer = tensor.name.removesuffix(".weight")
        if f"{layer}.SCB" in stored:
            scales = find(stored, f"{layer}.SCB").astype(np.float32) / 127
            return find(stored, tensor.name).astype(np.float32) * scales[:, None]
        if f"{tensor.name}.absmax" not in stored:
            return find(stored, tensor.name)
        check(stored, tensor.name, tensor.shape)
        state = _state(stored, tensor.name)
        halves = find(stored, tensor.name).reshape(-1)
        places = np.stack([halves >> 4, halves & 15], axis=-1).reshape(-1)[: tensor.numel]
        peaks = find(stored, f"{tensor.name}.absmax").reshape(-1)
        if f"{tensor.name}.nested_absmax" in stored:
            outer = np.repeat(find(stored, f"{tensor.name}.nested_absmax"), state["nested_blocksize"])[: len(peaks)]
            peaks = find(stored, f"{tensor.name}.nested_quant_map")[peaks] * outer + np.float32(state["nested_offset"])
        values = find(stored, f"{tensor.name}.quant_map")[places]
        values = values * np.repeat(peaks, state["blocksize"])[: tensor.numel]
        return _round_to(values, state.get("dtype")).reshape(tensor.shape)

    return weights


def _state(stored: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    found = [each for each in stored if each.startswith(f"{name}.{STATE}")]
    try:
        if stored[found[0]].nbytes > MAX_STATE:  # before it is read
            raise Unread(f"{found[0]} is over {MAX_STATE >> 10} KiB")
        state = bounded_json.loads(find(stored, found[0]).tobytes(), MAX_STATE)
        return {key: state[key] for key in STATE_KEYS if key in state}
    except (IndexError, ValueError, TypeError):
        raise Unread(f"{name} has no {STATE}TYPE that is JSON") from None


def _round_to(values: np.ndarray, dtype: str | None) -> np.ndarray:
    """float32 values as they are in a dtype of torch's. Raises `Unread` for one that no model has."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # the upper half, to the nearest and to even
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    raise Unread(f"its weights are of dtype {dtype!r:.40}")


def rounding(artifact: Path) -> Callable[[str, Any], Any] | None:
    """See `layouts`: LLM.int8() rounds each row of activations in steps of 1/127 of its largest, but for columns that
    hold an outlier (arXiv:2208.07339). Four-bit weights are multiplied as float numbers."""
    words = shards.read_json(artifact / "config.json").get("quantization_config") or {}
    if not words.get("load_in_8bit"):
        return None
    stored = shards.find(artifact).tensors()

    def round_input(layer: str, x: Any) -> Any:
        if f"{layer}.SCB" not in stored:
            return x
        large = x.abs() >= OUTLIER
        whole = large.flatten(0, -2).any(0)
        step = x.masked_fill(large, 0).abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
        return x.where(whole, (x / step).round() * step)

    return round_input
