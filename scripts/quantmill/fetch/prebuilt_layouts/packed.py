"""Layouts of safetensors with packed matrices and a quantization_config: GPTQ, AWQ and others."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantmill import layouts
from quantmill.checkpoint import EMBEDDINGS, HEAD, headers, reads_more_than_text, sharding, shards, sizes, used
from quantmill.checkpoint.copying import equal_bytes
from quantmill.checkpoint.selection import select
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common import plain_file
from quantmill.common.program import UserError, printable
from quantmill.fetch import same_model
from quantmill.fetch.prebuilt_layouts import MAX_WORD, plain

QUANTIZE_CONFIG = "quantize_config.json"  # from which auto-gptq reads its quantization_config
MAX_GROUP = 2**31  # more inputs than any model has, and within the 64 bits of the results' tables
PARAMETERS = (
    *("bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "zero_point", "version", "format"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
)


def local(path: Path) -> dict[str, Path]:
    """See `prebuilt_layouts`."""
    found = find(path)
    found.tensors()
    files = [*found.files, *filter(None, [found.index()]), *found.others()]
    files += [each for each in [path / QUANTIZE_CONFIG] if plain_file.is_there(each)]
    return {file.name: file for file in files}


def remote(repository: str, names: Iterable[str], file: str | None) -> dict[str, str]:
    """See `prebuilt_layouts`."""
    return {name: name for name in [*select(repository, names), *({QUANTIZE_CONFIG} & {*names})]}


def check(folder: Path, model: Path, layout: str) -> dict[str, Any]:
    """See `prebuilt_layouts`."""
    same_model.check_config(folder, model)
    config, source = shards.read_config(folder / "config.json"), shards.find(model)
    sizes.check(folder / "config.json", config, source.tensors())
    headers.check_ids(folder / "config.json", config)
    theirs, ours = (same_model.tokens(each) for each in (folder, model))
    if theirs and ours:
        same_model.check_tokens(folder, theirs, ours)
    found = find(folder)
    words = quantization(folder, layout)
    stored = check_packed(folder, layout, words, source)
    unread = left_over(folder, layout, stored, source)
    sharding.place_index(found, [*stored.values()], folder)
    nbytes = {name: tensor.nbytes for name, tensor in stored.items() if name not in unread}
    return {
        "unread": {name: stored[name].nbytes for name in unread},
        "tool": tool(words),
        "parameters": plain({name: words[name] for name in PARAMETERS if name in words}),
        "weight_files": [file.name for file in found.files],
        "weight_bytes_per_token": shards.bytes_read(nbytes, config),
    }


def find(folder: Path) -> Checkpoint:
    """Find a checkpoint as `shards.find`. Raises `UserError` also for pickled weights."""
    found = shards.find(folder)
    if found.form != "safetensors":
        raise UserError(f"{folder}: its weights are pickled ({found.form}); name an artifact with safetensors")
    return found


def quantization(folder: Path, layout: str) -> dict[str, Any]:
    """Return a folder's quantization_config. Raises `UserError` if it is another layout's."""
    found = shards.read_config(folder / "config.json").get("quantization_config")
    if not isinstance(found, dict):
        raise UserError(
            f"{folder}: its config.json has no quantization_config; if {QUANTIZE_CONFIG} has it, copy it there"
        )
    if plain_file.is_there(folder / QUANTIZE_CONFIG):
        other = shards.read_json(folder / QUANTIZE_CONFIG)
        if wrong := [name for name in PARAMETERS if name in found and name in other and found[name] != other[name]]:
            raise UserError(
                f"{folder}: config.json and {QUANTIZE_CONFIG} name another {wrong[0]}; one of them is wrong"
            )
    method = found.get("quant_method")
    if method != layout:
        raise UserError(f"{folder}: its quantization_config says {method!r}, not {layout!r}; name its own layout")
    return found


def check_packed(folder: Path, layout: str, words: Mapping[str, Any], source: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of an artifact after checking them against the shapes that the layout's module gives. Raises
    `UserError` if a tensor of the source is missing or has another size, and if the bits or the group size of the
    config are not those of the weights."""
    stored, reader = shards.find(folder).tensors(), layouts.module(layout)
    if dropped := headers.own_names(folder, source.config(), stored)[1]:
        raise UserError(
            f"{folder}: its names have {dropped} before the model's own, which no engine removes; save it again"
        )
    said = ""
    if layout in ("gptq", "awq"):
        bits = words.get("bits", words.get("w_bit"))
        group = words.get("group_size", words.get("q_group_size", -1))
        if type(bits) is not int or type(group) is not int or bits < 1 or not (group == -1 or 0 < group < MAX_GROUP):
            raise UserError(
                f"{folder}: its config names {bits!r:.60} bits and groups of {group!r:.60}; both are numbers from 1 "
                "on, or -1 for groups of a whole column"
            )
        said = f"{bits} bits and groups of {group}, its config's, "
    ours = source.tensors()
    of_layer = {each.rpartition(".")[0]: each for each in stored.keys() - ours.keys()}
    for name, tensor in ours.items():
        layer = layouts.Layer(tensor, stored)
        if len(tensor.shape) != 2 and layer.name in of_layer:
            other = of_layer[layer.name]
            raise UserError(f"{folder}: holds {other}, and this model's {name} is not a matrix; name an artifact of it")
        try:
            shapes = reader.packed_shapes(words, tensor.shape) if len(tensor.shape) == 2 else {}
            if shapes and hasattr(reader, "check"):
                reader.check(layer)
        except layouts.Unread as reason:
            raise UserError(f"{folder}: {reason}; Quantmill does not know how to check such an artifact") from None
        if not any(part in layer for part in shapes if part != "weight"):
            if name not in stored:
                raise UserError(f"{folder}: lacks {name}, which this model has")
            if stored[name].shape != tensor.shape:
                both = f"{list(stored[name].shape)}, this model's {list(tensor.shape)}"
                raise UserError(f"{folder}: is another model: its {name} is {both}")
            if tensor.dtype in layouts.FLOATS and stored[name].dtype not in layouts.FLOATS:
                raise UserError(f"{folder}: its {name} is {stored[name].dtype}, and nothing scales it")
            continue
        for part, shape in shapes.items():
            found, part = layer.tensor(part), f"{layer.name}.{part}"
            if found is None:
                raise UserError(f"{folder}: lacks {part}, without which {layer.name} has no weights")
            if said and found.dtype not in (layouts.FLOATS if part.endswith(".scales") else {"I32"}):
                raise UserError(f"{folder}: its {part} is {found.dtype}, which no {layout} artifact's is")
            if found.shape != shape:
                made = f"{said or 'its config '}make{'s' if not said else ''} {list(shape)} of this model's layer"
                raise UserError(f"{folder}: its {part} is {list(found.shape)}; {made}")
    return stored


def left_over(folder: Path, layout: str, stored: Mapping[str, Tensor], source: Checkpoint) -> list[str]:
    """Return names of an artifact's harmless tensors that nothing reads: buffers, multi-token prediction layers,
    towers, biases of zeros that the model does not have, and a second copy of a tied head. Raises `UserError` with the
    first of those that nothing explains."""
    ours, parts = source.tensors(), re.compile(layouts.module(layout).PARTS)
    layers = {name.removesuffix(".weight") for name, tensor in ours.items() if len(tensor.shape) == 2}
    layers |= {HEAD.removesuffix(".weight")} if layout == "exl3" else set()

    def is_part(name: str) -> bool:
        places = [place for place, letter in enumerate(name) if letter == "."]
        return any(name[:place] in layers and parts.fullmatch(name[place + 1 :]) for place in places)

    left = [name for name in stored if name not in ours and not is_part(name)]
    further = used.further_layers(left)
    harmless = {name for name in left if name in further or reads_more_than_text(name) or used.is_buffer(stored[name])}
    for name in left:
        tensor, layer = stored[name], name.removesuffix(".bias")
        if layer in layers and layer != name and len(tensor.shape) == 1 and not layouts.array(tensor).any():
            harmless.add(name)  # as early versions of auto-gptq wrote for every layer
        if name == HEAD and EMBEDDINGS in stored and equal_bytes(tensor, stored[EMBEDDINGS]):
            harmless.add(name)
    unread = [name for name in left if name not in harmless]
    if unread:
        raise UserError(
            f"{folder}: this model has no place for {used.first_of(unread)}; name an artifact of this model, or "
            "remove them if nothing needs them"
        )
    return left


def tool(words: Mapping[str, Any]) -> str:
    """Return the name of the tool that built an artifact, if the artifact gives it."""
    meta = words.get("meta")
    named = meta.get("quantizer") if isinstance(meta, dict) else None
    return printable(", ".join(map(str, named))[:MAX_WORD]) if isinstance(named, list) and named else "unknown"
