"""Models that their authors published in low bits: the weights as tensors that are decoded while they are read.

A model's own config.json says how, in `quantization_config`. What a library would compute from such weights is a source
like any other, so the rest of Quantmill sees decoded weights alone.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from quantmill.checkpoint import headers, safetensors_file, sharding, sizes
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError
from quantmill.layouts import Unread, compressed_tensors, fp8, mxfp4
from quantmill.layouts.decoded import Decoded, check_scales

# quant_method -> how its weights are read
LAYOUTS: dict[str, ModuleType] = {"fp8": fp8, "mxfp4": mxfp4, "compressed-tensors": compressed_tensors}
KEY = "quantization_config"
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}  # by config.json's name
# of a layer's inputs and outputs, and of the key-value cache
ACTIVATIONS = re.compile(
    r"(?:(?P<layer>.+)[._](?:input|output|activation)|.+\.[qkv])_(?:scale|zero_point|global_scale)"
)
SHARD_BYTES = 5 * 10**9
ORIGINAL = "name a model with the original weights"


@dataclass(frozen=True)
class Published:
    """A model in low bits. config: its config.json without `quantization_config`. tensors: its weights by their own
    names, some of them `Decoded`. facts: what manifests say of it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded weights."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def scheme(place: Path | str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of a model that was published in low bits; None for a model in floats. Raises
    `UserError` for one that is not decoded. place: the model's name in errors."""
    found = config.get(KEY) or _inner(config).get(KEY)
    if not found:
        return None
    named = found.get("quant_method") if isinstance(found, dict) else None
    method = named if isinstance(named, str) and named else "by an unknown method"
    refused = f"{place}: its weights are quantized ({method:.60})"
    if method not in LAYOUTS:
        raise UserError(f"{refused}; {ORIGINAL}")
    try:
        LAYOUTS[method].describe(found)
    except Unread as reason:
        raise UserError(f"{refused}, and {reason}; {ORIGINAL}") from None
    return found


def dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a model's weights are decoded to: config.json's, bfloat16 if it names no other float."""
    words = sizes.text_words(config)
    said = str(words.get("dtype") or words.get("torch_dtype"))
    return said if said in DTYPES else "bfloat16"


def read(source: Checkpoint) -> Published | None:
    """Find the weights of a model that was published in low bits; None for a model in floats. Of the files, headers and
    small tables are read. Raises `UserError` as `scheme` does, and for tensors that do not fit each other."""
    config = source.config()
    words = scheme(source.folder, config)
    if words is None:
        return None
    if source.form != "safetensors":
        raise UserError(f"{source.folder}: its quantized weights are pickled; name a model with safetensors")
    method, stored, wanted = str(words["quant_method"]), source.tensors(), dtype(config)
    headers.refuse_empty(stored)
    try:
        weights = LAYOUTS[method].decoded(words, stored)
    except Unread as reason:
        raise UserError(f"{source.folder}: its weights are quantized ({method}), and {reason}; {ORIGINAL}") from None
    if not weights:
        raise UserError(
            f"{source.folder}: config.json says that its weights are quantized ({method}), and none is; remove its "
            f"{KEY}, or download the model again"
        )
    parts = frozenset[str]().union(*(each.parts for each in weights))
    layers = {each.name.removesuffix(".weight") for each in weights}
    kept = {name: each for name, each in stored.items() if name not in parts and not _of_activations(name, layers)}
    for each in weights:
        if each.name in kept:
            raise UserError(f"{each.path}: holds {each.name} twice, once in low bits; only one of them can be right")
        kept[each.name] = replace(each, dtype=DTYPES[wanted])
    facts = {"layout": method, "weights": LAYOUTS[method].describe(words), "dtype": wanted, "tensors": len(weights)}
    return Published(_without(config), kept, facts)


def write(found: Published, folder: Path) -> list[str]:
    """Write a decoded model's weights and config.json to a folder, and return the names of the weight files. Raises
    `UserError` for scales and weights that are no numbers, and OSError if the disk has no room."""
    tensors = [*found.tensors.values()]
    for tensor in tensors:
        if isinstance(tensor, Decoded):
            check_scales(tensor.scales)
    if shutil.disk_usage(folder).free < found.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    with tqdm(total=found.nbytes, unit="B", unit_scale=True, desc="decoding", disable=None) as bar:

        def write_file(path: Path, group: Sequence[Tensor]) -> None:
            safetensors_file.write(path, group, progress=bar.update)

        names = [*sharding.write(folder, "safetensors", sharding.split(tensors, SHARD_BYTES), write_file)]
    (folder / "config.json").write_text(json.dumps(found.config, indent=2) + "\n", encoding="utf-8")
    return names


def _of_activations(name: str, layers: Collection[str]) -> bool:
    """Return whether a tensor scales what a model calculates, not its weights: the cache, or what enters or leaves a
    layer in low bits. A model's own parameters may have such names (Gemma 3n's `altup.correct_output_scale`)."""
    found = ACTIVATIONS.fullmatch(name)
    return found is not None and (found["layer"] is None or found["layer"] in layers)


def _inner(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json whose weights are not quantized any more."""
    found = {key: value for key, value in config.items() if key != KEY}
    if inner := _inner(config):
        found["text_config"] = {key: value for key, value in inner.items() if key != KEY}
    return found
