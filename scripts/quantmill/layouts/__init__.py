"""What the weights of an artifact are, by our own reading of its format: one module a layout, by its common name.

A module has `read(artifact, source)`, which returns a function: a tensor of the source -> the float32 array, in that
tensor's shape, that the artifact holds in its place. Reading is numpy alone: no library that made or runs the format.

Where an engine rounds activations too, the module has `rounding(artifact)`, which returns a function: a layer's name
and the tensor of torch's that it is given -> the same rounded; or None where this artifact's are not. Where an artifact
can have a head of its own though its model ties it to the embeddings, `own_head(artifact)` says whether it does. Of
layouts that somebody else may have built, `packed` says what is stored (see `Shapes`), PARTS is a pattern of all that
a layer may have besides, and `check`, where there is one, refuses what its library could not read safely.
"""

import importlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quantmill.checkpoint import conversion, headers, portable, safetensors_file, sharding, shards, used
from quantmill.checkpoint.copying import copy, write_all
from quantmill.checkpoint.float16 import CAST, as_float, fits
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.atomic import share

FLOATS = CAST | {"F16"}
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Reading = Callable[[Tensor], np.ndarray]
# What a module's `packed(quantization_config, layer, shape)` returns: the tensors that hold a matrix of this shape,
# with theirs. A layer that has none of these names is stored plain.
Shapes = Mapping[str, tuple[int, ...]]
NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "U32": "<u4", "I64": "<i8", "I16": "<i2"}
NUMPY |= {"U8": "u1", "I8": "i1"}
FOUR_BITS = np.arange(0, 32, 4, dtype=np.uint32)


def _e4m3() -> np.ndarray:
    """The values of float8 e4m3 by their bytes (arXiv:2209.05433): no infinities, NaN where all bits but the sign are
    set."""
    exponent, mantissa = np.divmod(np.arange(128, dtype=np.float32), 8)
    values = np.where(exponent > 0, (1 + mantissa / 8) * np.exp2(exponent - 7), mantissa / 8 * np.exp2(np.float32(-6)))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3()


class Unread(Exception):
    """An artifact whose weights are stored in a way that we do not read: nothing is said against them."""


def array(tensor: Tensor) -> np.ndarray:
    """A stored tensor as it is, bfloat16 and float8 (e4m3) as float32. Raises `Unread` for a dtype that numpy has no
    name for."""
    data = b"".join(map(bytes, tensor.chunks()))
    if tensor.dtype == "F8_E4M3":
        return E4M3[np.frombuffer(data, "u1")].reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return as_float(memoryview(data), "BF16").reshape(tensor.shape)
    if tensor.dtype not in NUMPY:
        raise Unread(f"{tensor.name} is {tensor.dtype}")
    return np.frombuffer(data, NUMPY[tensor.dtype]).reshape(tensor.shape)


# How Mixtral's tensors were called when it came out, and how tools call them that have them from transformers 5
OLDER = ((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."))


def stored_tensors(artifact: Path, source: Checkpoint) -> dict[str, Tensor]:
    """The tensors of an artifact's folder, by the names that its source has for them."""
    found = shards.find(artifact).tensors()
    if not any(OLDER[0][1] in name for name in source.tensors()):
        return found
    older = {}
    for name, tensor in found.items():
        for new, old in OLDER if ".mlp." in name else ():
            name = name.replace(new, old)
        older[name] = tensor
    return older


def find(stored: Mapping[str, Tensor], name: str) -> np.ndarray:
    """A stored tensor by its name. Raises `Unread` where there is none."""
    if name not in stored:
        raise Unread(f"it holds no {name}")
    return array(stored[name])


def nibbles(words: np.ndarray) -> np.ndarray:
    """int32 [..., n] -> float32 [..., n, 8]: the eight numbers of each word, the lowest bits first."""
    return ((words.view(np.uint32)[..., None] >> FOUR_BITS) & 15).astype(np.float32)


def step_round(x: Any, steps: int) -> Any:
    """A tensor of torch's [..., inputs], each row rounded to so many steps to either side, its largest the last."""
    step = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / steps
    return (x / step).round() * step


def write_model(folder: Path, source: Checkpoint, reading: Reading | None, dtype: str, own_head: bool = False) -> None:
    """Write a model's folder that transformers loads: a source's config.json, and its weights as an artifact holds
    them, stored as `dtype` (F32 or F16), or where there is no `reading` the source's own files, shared.
    `own_head`: the artifact has a head besides the embeddings, which is written too. What the source's manifest says to
    be beside what its model uses is not asked for.

    Raises `Unread` where the artifact's weights cannot be read.
    """
    folder.mkdir()
    config, beside = portable.config(source.config()), used.beside(source.folder)
    tensors = {name: tensor for name, tensor in source.tensors().items() if name not in beside}
    if own_head and HEAD not in tensors:
        config |= {"tie_word_embeddings": False}
        tensors |= {HEAD: replace(tensors[EMBEDDINGS], name=HEAD)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if reading is None:
        model = headers.read(source.folder)
        if model.dropped:  # which transformers would not take off: it would begin at random
            groups = sharding.group_by_file(list(model.tensors.values()))
            conversion.convert(groups, folder, "safetensors", verify=False, hash=False)
            return
        for file in source.files:
            share(file, folder / file.name)
        sharding.place_index(source, list(tensors.values()), folder)
        return

    # the engine sees weights that float16 has no number for, and takes bfloat16
    wide = {each.name for each in tensors.values() if dtype == "F16" and each.is_weight and not fits(each)}

    def stored_dtype(tensor: Tensor) -> str:
        if tensor.dtype not in FLOATS:
            return tensor.dtype
        return "F32" if tensor.name in wide else dtype

    def write_weights(tensor: Tensor, target: io.FileIO) -> None:
        if tensor.dtype not in FLOATS:  # buffers of integers
            copy(tensor, target)
            return
        weights = reading(tensor)
        if weights.shape != tensor.shape:
            raise Unread(f"{tensor.name} has shape {list(weights.shape)}, not {list(tensor.shape)}")
        write_all(
            target, memoryview(np.ascontiguousarray(weights, NUMPY[stored_dtype(tensor)]).reshape(-1).view(np.uint8))
        )

    write_file = partial(safetensors_file.write, dtype=stored_dtype, copy=write_weights)
    sharding.write(folder, "safetensors", sharding.group_by_file(list(tensors.values())), write_file)


def module(layout: str) -> ModuleType:
    """The module of a layout, `-` as `_`."""
    return importlib.import_module(f"quantmill.layouts.{layout.replace('-', '_')}")


def rounding(layout: str, artifact: Path) -> Callable[[str, Any], Any] | None:
    """What `rounding` of a layout's module says of an artifact; None where it has no such function."""
    says = getattr(module(layout), "rounding", None)
    return says(artifact) if says else None


def own_head(layout: str, artifact: Path) -> bool:
    """What `own_head` of a layout's module says of an artifact; no, where it has no such function."""
    says = getattr(module(layout), "own_head", None)
    return bool(says and says(artifact))
