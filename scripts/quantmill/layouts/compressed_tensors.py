"""compressed-tensors, as llm-compressor stores it: of each linear layer packed numbers and scales; all else as it was.

config.json says in `quantization_config` how each group of layers is packed:

| format | tensors of a layer [outputs, inputs] | a weight |
|---|---|---|
| `pack-quantized` | weight_packed int32 [outputs, inputs / 8], lowest bits first; weight_scale | (q - 8) * scale |
| `int-quantized` | weight int8; weight_scale [outputs, 1] | q * scale |
| `float-quantized` | weight float8 (e4m3); weight_scale [outputs, 1] | q * scale |
| `nvfp4-pack-quantized` | weight_packed uint8 [outputs, inputs / 2]; scales e4m3 | q * scale / weight_global_scale |
| `mxfp4-pack-quantized` | weight_packed uint8; weight_scale uint8 | q * 2^(scale - 127) |

q of the last two is a four-bit float (e2m1), the lower half of a byte first. Scales are those of groups of inputs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.layouts import E4M3, Layer, Reading, Unread, find, nibbles, quantization, read_layers, step_round

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
FORMATS = (*PACKED, "int-quantized", "float-quantized")
E4M3_MAX, E2M1_MAX = 448, 6


def scheme(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization_config's one group of all layers, with its format. Raises `Unread` if they are packed in
    several ways."""
    groups = words.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise Unread("its layers are quantized in several ways")
    (group,) = groups.values()
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise Unread("it does not say how its weights are quantized")
    found = {**group, "format": group.get("format") or words.get("format")}
    if found["format"] not in FORMATS or words.get("transform_config") or words.get("sparsity_config"):
        raise Unread(f"its format is {found['format']!r:.60}")
    if not group["weights"].get("symmetric") or group["weights"].get("num_bits") not in (4, 8):
        raise Unread("its weights are not symmetric, or do not have 4 or 8 bits")
    return found


PARTS = r"weight_(packed|scale|shape|zero_point|global_scale|g_idx)|(input|output)_(scale|zero_point|global_scale)"


def packed_shapes(words: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """See `layouts`."""
    outputs, inputs = shape
    found = scheme(words)
    bits, size = found["weights"]["num_bits"], found["weights"].get("group_size")
    groups = -(-inputs // size) if isinstance(size, int) and size > 0 else 1
    if found["format"] not in PACKED:
        return {"weight": (outputs, inputs), "weight_scale": (outputs, groups)}
    width = inputs * bits // (32 if found["format"] == "pack-quantized" else 8)
    return {"weight_packed": (outputs, width), "weight_scale": (outputs, groups)}


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for layers that are packed in another way."""
    format = scheme(quantization(artifact))["format"]

    def weights(layer: Layer) -> np.ndarray:
        scales = layer["weight_scale"]
        if format == "pack-quantized":
            words = layer["weight_packed"]
            numbers = nibbles(words).reshape(len(words), -1)[:, : layer.matrix.shape[1]] - 8
        elif format in PACKED:
            halves = layer["weight_packed"]
            numbers = E2M1[np.stack([halves & 15, halves >> 4], axis=-1).reshape(len(halves), -1)]
        else:
            numbers = layer.floats("weight")
        if format == "mxfp4-pack-quantized":
            scales = np.exp2(scales.astype(np.float32) - 127)
        elif format == "nvfp4-pack-quantized":
            scales = scales / layer["weight_global_scale"]
        return numbers * np.repeat(scales.astype(np.float32), numbers.shape[1] // scales.shape[1], axis=1)

    return read_layers(artifact, source, ["weight_scale"], weights)


def rounds_activations(artifact: Path) -> bool:
    """Return whether a config.json says, as compressed-tensors does, that activations are rounded to few bits."""
    path = artifact / "config.json"
    words = shards.read_config(path).get("quantization_config") if path.is_file() else None
    groups = words.get("config_groups") if isinstance(words, dict) else None
    found = groups.values() if isinstance(groups, dict) else ()
    return any(isinstance(each, dict) and bool(each.get("input_activations")) for each in found)


def rounding(artifact: Path) -> Callable[[str, Any], Any] | None:
    """See `layouts`. int8 and float8 are rounded by row, four-bit floats by groups of a row; None without
    input_activations in the config."""
    found = scheme(quantization(artifact))
    if not found.get("input_activations"):
        return None
    stored = shards.find(artifact).tensors()

    def round_input(layer: str, x: Any) -> Any:
        if f"{layer}.weight_scale" not in stored:
            return x
        if found["format"] == "int-quantized":
            return step_round(x, 127)
        if found["format"] == "float-quantized":
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / E4M3_MAX
            return _nearest(x / scale, E4M3[np.isfinite(E4M3)]) * scale
        size = found["weights"]["group_size"]
        groups = x.reshape(*x.shape[:-1], -1, size)
        peaks = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        if found["format"] == "nvfp4-pack-quantized":
            whole = float(find(stored, f"{layer}.input_global_scale")[0])
            steps = _nearest(peaks / E2M1_MAX * whole, E4M3[np.isfinite(E4M3)]) / whole
        else:
            steps = ((peaks * 8 / 7).log2().floor() - 2).exp2()  # from 1.75 on, the next power of two
        steps = steps.clamp(min=1e-30)
        return (_nearest(groups / steps, E2M1) * steps).reshape(x.shape)

    return round_input


def _nearest(x: Any, values: np.ndarray) -> Any:
    """Return each element of a tensor as the nearest of some values, beyond them as the outermost."""
    import torch

    known = torch.from_numpy(np.unique(values)).to(x)
    return known[torch.bucketize(x.contiguous(), (known[1:] + known[:-1]) / 2)]
