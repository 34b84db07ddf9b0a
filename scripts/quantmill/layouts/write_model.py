"""Write the model that an artifact's weights make, for transformers to run."""

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from quantmill.checkpoint import (
    EMBEDDINGS,
    HEAD,
    conversion,
    finite,
    headers,
    portable,
    safetensors_file,
    sharding,
    used,
)
from quantmill.checkpoint.copying import copy, write_all
from quantmill.checkpoint.float16 import fits
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.atomic import share
from quantmill.common.program import UserError
from quantmill.layouts import FLOATS, NUMPY, Reading, Unread


def write_model(folder: Path, source: Checkpoint, reading: Reading | None, dtype: str, own_head: bool = False) -> None:
    """Write a model's folder that transformers loads: a source's config.json, and the weights of an artifact.

    Tensors that the model does not use, by the source's manifest, are left out. Raises `Unread` for weights that cannot
    be read, and `UserError` for those that are NaN or infinite.

    Args:
        reading: the artifact's weights; None: the source's own files, shared.
        dtype: F32 or F16, in which weights are stored.
        own_head: whether the artifact has a head although the source ties it; it is written too.
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
        if model.dropped:  # transformers keeps such prefixes, and would initialise these tensors at random
            groups = sharding.group_by_file(list(model.tensors.values()))
            conversion.convert(groups, folder, "safetensors", verify=False, hash=False)
            return
        for file in source.files:
            share(file, folder / file.name)
        sharding.place_index(source, list(tensors.values()), folder)
        return

    # for weights beyond float16 the engine takes bfloat16
    wide = {each.name for each in tensors.values() if dtype == "F16" and each.is_weight and not fits(each)}

    def stored_dtype(tensor: Tensor) -> str:
        if tensor.dtype not in FLOATS:
            return tensor.dtype
        return "F32" if tensor.name in wide else dtype

    def write_weights(tensor: Tensor, target: io.FileIO) -> None:
        if tensor.dtype not in FLOATS:  # buffers of integers
            copy(tensor, target)
            return
        weights = np.ascontiguousarray(reading(tensor), np.float32)
        if weights.shape != tensor.shape:
            raise Unread(f"{tensor.name} has shape {list(weights.shape)}, not {list(tensor.shape)}")
        if (place := finite.first_not_finite(weights.reshape(-1).view(np.uint8).data, "F32")) is not None:
            where = [int(index) for index in np.unravel_index(place, weights.shape)]
            raise UserError(f"by its numbers and scales, {tensor.name} is NaN or infinite at {where}; build it again")
        write_all(target, np.ascontiguousarray(weights, NUMPY[stored_dtype(tensor)]).reshape(-1).view(np.uint8).data)

    write_file = partial(safetensors_file.write, dtype=stored_dtype, copy=write_weights)
    sharding.write(folder, "safetensors", sharding.group_by_file(list(tensors.values())), write_file)
