"""compressed-tensors, as llm-compressor stores it: of each linear layer packed numbers and scales; all else as it was.

config.json says in `quantization_config` how each group of layers is packed:

| format | tensors of a layer [outputs, inputs] | a weight |
|---|---|---|
| `pack-quantized` | weight_packed int32 [outputs, inputs * bits / 32], lowest bits first | (q - z) * scale |
| `int-quantized` | weight int8 | (q - z) * scale |
| `float-quantized` | weight float8 (e4m3) | q * scale |
| `naive-quantized` | as one of the two above, by the config's `type` | |
| `nvfp4-pack-quantized` | weight_packed uint8 [outputs, inputs / 2]; scales e4m3 | q * scale / weight_global_scale |
| `mxfp4-pack-quantized` | weight_packed uint8; weight_scale uint8 | q * 2^(scale - 127) |

q of the last two is a four-bit float (e2m1), the lower half of a byte first. weight_scale has a number for each group
of inputs, row (`channel`), block or tensor, by the config's `strategy`. z is 0, of packed numbers 8 or 128; if they are
not symmetric, it is weight_zero_point, which is packed as the numbers are, but along outputs. weight_g_idx is the
group of each input, if groups are not in order.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor, row_major
from quantmill.common.program import UserError
from quantmill.layouts import (
    E2M1,
    E4M3,
    E8M0,
    Layer,
    Reading,
    Unread,
    array,
    find,
    four_bit_floats,
    nibbles,
    quantization,
    read_layers,
    spread,
    step_round,
)
from quantmill.layouts.decoded import AGAIN, Decoded, blocks, check_shape, is_power_of_two, make, matrix_pieces, part

PACK, INT8, FLOAT8, NVFP4 = "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"
# format -> the bits of a number, and the dtype in which a layer's numbers are stored
FORMATS = {
    PACK: ((4, 8), "I32"),
    INT8: ((8,), "I8"),
    FLOAT8: ((8,), "F8_E4M3"),
    NVFP4: ((4,), "U8"),
    "mxfp4-pack-quantized": ((4,), "U8"),
}
DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True}  # of compressed-tensors' QuantizationArgs
HALVES = (NVFP4, "mxfp4-pack-quantized")  # of bytes, which a source does not have
E4M3_MAX, E2M1_MAX = 448, 6
PARTS = r"weight_(packed|scale|shape|zero_point|global_scale|g_idx)|(input|output)_(scale|zero_point|global_scale)"


def scheme(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization_config's one group of all layers, with its format, and with what the library takes where
    nothing is said. Raises `Unread` if layers are packed in several ways, or in an unknown one."""
    groups = words.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise Unread("its layers are quantized in several ways")
    (group,) = groups.values()
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise Unread("it does not say how its weights are quantized")
    weights, format = DEFAULTS | group["weights"], group.get("format") or words.get("format")
    if format == "naive-quantized":
        format = FLOAT8 if weights["type"] == "float" else INT8
    sparse = words.get("sparsity_config") or {}
    dense = isinstance(sparse, dict) and sparse.get("format", "dense") == "dense"
    if format not in (*FORMATS,) or words.get("transform_config") or not dense:
        raise Unread(f"its format is {format!r:.60}{'' if dense else ', sparse'}")
    if type(weights["num_bits"]) is not int or weights["num_bits"] not in FORMATS[format][0]:
        raise Unread(f"its weights have {weights['num_bits']!r:.20} bits")
    weights["strategy"] = by = strategy(weights)
    zeros = {PACK: ("group", "channel"), INT8: ("channel", "tensor")}
    if type(weights["symmetric"]) is not bool or not (weights["symmetric"] or by in zeros.get(format, ())):
        raise Unread(f"its weights are not symmetric, by {by!r:.20}")
    return {**group, "format": format, "weights": weights}


def strategy(weights: Mapping[str, Any]) -> str:
    """Return what shares a scale, by a scheme's `weights`; without a word of it that follows from the group size."""
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    return str(weights.get("strategy") or implied)


def block(weights: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the size [rows, columns] of the blocks of a matrix that share a scale; weights: a scheme's. Raises
    `Unread` for other scales."""
    by, size, sides = weights["strategy"], weights.get("group_size"), weights.get("block_structure")
    if by == "tensor":
        return shape[0], shape[1]
    if by == "channel":
        return 1, shape[1]
    found = [1, size] if by in ("group", "tensor_group") else sides if by == "block" else None
    if isinstance(found, list) and len(found) == 2 and all(type(each) is int and 0 < each < 2**31 for each in found):
        return found[0], found[1]
    raise Unread(f"its scales are by {by!r:.20} of {sides if by == 'block' else size!r:.30}")


def packed_shapes(words: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """See `layouts`."""
    found, (outputs, inputs) = scheme(words), shape
    format, weights, bits = found["format"], found["weights"], found["weights"]["num_bits"]
    scales = (1,) if weights["strategy"] == "tensor" else blocks(shape, block(weights, shape))
    parts = {"weight_scale": scales}
    if not weights["symmetric"]:
        parts["weight_zero_point"] = (-(-outputs * bits // 32), *scales[1:]) if format == PACK else scales
    if format in (PACK, *HALVES):
        return {"weight_packed": (outputs, -(-inputs * bits // (32 if format == PACK else 8))), **parts}
    return {"weight": (outputs, inputs), **parts}


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for layers that are packed in another way."""
    found = scheme(quantization(artifact))
    return read_layers(artifact, source, ["weight_scale"], lambda layer: rows(found, layer, 0, layer.matrix.shape[0]))


def rows(found: Mapping[str, Any], layer: Layer, first: int, last: int) -> np.ndarray:
    """Return a layer's rows `first`, a multiple of 8, to `last` as float32. found: its scheme."""
    format, weights, shape = found["format"], found["weights"], (last - first, layer.matrix.shape[1])
    share = block(weights, layer.matrix.shape)
    scales = layer.rows("weight_scale", first, last, share[0])
    if format in HALVES:
        scales = scales / layer["weight_global_scale"] if format == NVFP4 else E8M0[scales]
        return four_bit_floats(layer.rows("weight_packed", first, last)) * spread(scales, share, shape, first)
    order = layer["weight_g_idx"] if "weight_g_idx" in layer else np.array(-1)
    of_input = None if (order < 0).all() else order  # llm-compressor leaves -1 where groups are in order
    if format == PACK:
        numbers = unpack(layer.rows("weight_packed", first, last), weights["num_bits"])
        numbers = numbers.reshape(shape[0], -1)[:, : shape[1]]
        zeros: Any = 2 ** (weights["num_bits"] - 1)
    else:
        numbers, zeros = layer.rows("weight", first, last).astype(np.float32), 0
    if not weights["symmetric"]:
        zeros = spread(zero_points(found, layer, first, last), share, shape, first, of_input)
    return (numbers - zeros) * spread(scales, share, shape, first, of_input)


def zero_points(found: Mapping[str, Any], layer: Layer, first: int, last: int) -> np.ndarray:
    """Return the zero points of rows `first` to `last`, in the order of their scales."""
    if found["format"] != PACK:
        return layer.rows("weight_zero_point", first, last)
    bits = found["weights"]["num_bits"]
    words = layer.rows("weight_zero_point", first, last, 32 // bits)
    return unpack(words, bits).transpose(0, 2, 1).reshape(-1, words.shape[1])[: last - first]


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack int32 [..., n] to float32 [..., n, 32 / bits], the lowest bits first; bits: 4 or 8."""
    return nibbles(words) if bits == 4 else words.view(np.uint8).reshape(*words.shape, 4).astype(np.float32)


def describe(words: Mapping[str, Any]) -> str:
    """See `layouts`."""
    found = scheme(words)
    weights = found["weights"]
    (height, width), by = block(weights, (1, 1)), weights["strategy"]
    floats = found["format"] == FLOAT8 or weights["type"] == "float"
    if found["format"] in HALVES or by == "tensor_group" or (floats and found["format"] in (PACK, INT8)):
        raise Unread(f"its format is {found['format']!r}, by {by!r} of {weights['type']!r:.20}")
    if not (is_power_of_two(height) and is_power_of_two(width)):
        raise Unread(f"its scales are of {height} x {width}, where powers of two are expected")
    said = {"group": f"in groups of {width}", "block": f"in blocks of {height} x {width}"}
    said |= {"channel": "with a scale for each row", "tensor": "with a scale for each tensor"}
    kind = "float8" if floats else f"int{weights['num_bits']}"
    return f"{kind} {said[by]}{'' if weights['symmetric'] else ', with zero points'}"


def decoded(words: Mapping[str, Any], stored: Mapping[str, Tensor]) -> list[Decoded]:
    """See `layouts`."""
    layers = {}  # name -> a tensor that shows that the layer is quantized
    for name, tensor in stored.items():
        layer, _, last = name.rpartition(".")
        if last in ("weight_packed", "weight_scale") or (last == "weight" and tensor.dtype in ("F8_E4M3", "I8")):
            layers[layer] = name
    return [decoded_layer(words, name, sign, stored) for name, sign in layers.items()]


def decoded_layer(words: Mapping[str, Any], name: str, sign: str, stored: Mapping[str, Tensor]) -> Decoded:
    """Return the weights of a layer; see `decoded`. sign: one of its tensors."""
    found, said = scheme(words), describe(words)
    packed, dtype = found["format"] == PACK, FORMATS[found["format"]][1]
    numbers = part(stored, f"{name}.{'weight_packed' if packed else 'weight'}", sign)
    if numbers.dtype != dtype or len(numbers.shape) != 2:
        what = f"{numbers.dtype} {list(numbers.shape)}, and {said} is a matrix of {dtype}"
        raise UserError(f"{numbers.path}: {numbers.name} is {what}; {AGAIN}")
    shape = whole_shape(numbers, part(stored, f"{name}.weight_shape", sign)) if packed else numbers.shape
    due = packed_shapes(words, shape)
    parts = {each: part(stored, f"{name}.{each}", sign) for each in due}
    for each, shape_due in due.items():
        if shape_due != (1,) or parts[each].shape:  # a number without a dimension is one as well
            check_shape(parts[each], shape_due, f"{said}, of {list(shape)}, make")
    layer = Layer(Tensor(f"{name}.weight", "F32", shape, row_major(shape), numbers.path, 0), stored)
    check_parts(found, layer)
    held = [tensor for each in ("scale", "zero_point", "shape", "g_idx") if (tensor := layer.tensor(f"weight_{each}"))]
    pieces = partial(matrix_pieces, shape, partial(rows, found, layer), 8)
    return make(layer.matrix.name, shape, [numbers, *held], parts["weight_scale"], pieces)


def whole_shape(numbers: Tensor, stored: Tensor) -> tuple[int, ...]:
    """Return the shape of a layer whose numbers are in words: the last word of a row may not be full. stored: that
    shape, as the file has it."""
    found = array(stored).tolist() if stored.dtype in ("I64", "I32") and stored.shape == (2,) else None
    if not found or found[0] != numbers.shape[0]:
        what = f"{stored.name} is {found or list(stored.shape)}, and {numbers.name} has {numbers.shape[0]} rows"
        raise UserError(f"{stored.path}: {what}; {AGAIN}")
    return tuple(found)


def check_parts(found: Mapping[str, Any], layer: Layer) -> None:
    """Raise `UserError` if the groups of a layer's inputs are not whole, or its zero points are of another kind."""
    weights, inputs, zeros = found["weights"], layer.matrix.shape[1], layer.tensor("weight_zero_point")
    size = block(weights, layer.matrix.shape)[1]
    if weights["strategy"] == "group" and inputs % size:
        raise UserError(f"{layer.matrix.path}: {layer.name} has {inputs} inputs, no multiple of {size}; {AGAIN}")
    if zeros and weights["symmetric"] and array(zeros).any():
        raise UserError(f"{zeros.path}: {zeros.name} is not 0, and config.json says symmetric; {AGAIN}")
    if zeros and not weights["symmetric"] and zeros.dtype != ("I32" if found["format"] == PACK else "I8"):
        raise UserError(f"{zeros.path}: {zeros.name} is {zeros.dtype}, and zero points are whole numbers; {AGAIN}")
    check(layer)


def check(layer: Layer) -> None:
    """Raise `UserError` if the order of a layer's inputs does not fill each of its groups: readers would take scales
    that are not there, or others than the library."""
    order, scales, inputs = layer.tensor("weight_g_idx"), layer.tensor("weight_scale"), layer.matrix.shape[1]
    if order is None or scales is None:
        return
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    if order.dtype in ("I32", "I64") and order.shape == (inputs,) and groups:
        named, counts = np.unique(array(order), return_counts=True)
        if named.tolist() in ([-1], [*range(groups)]) and (counts == inputs // len(named)).all():
            return
    raise UserError(f"{order.path}: {order.name} does not put as many inputs into each of {groups} groups; {AGAIN}")


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
