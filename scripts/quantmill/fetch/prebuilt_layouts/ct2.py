"""CTranslate2: model.bin with its config and vocabulary; nothing else is read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quantmill.checkpoint import ctranslate2_bin, ctranslate2_model, selection, shards
from quantmill.checkpoint.ctranslate2_model import CONFIG, MODEL, VOCABULARY
from quantmill.common import plain_file
from quantmill.common.program import UserError
from quantmill.fetch import same_model

FILES = (MODEL, CONFIG, VOCABULARY)  # the engine takes tokens by the vocabulary; older converters wrote other files


def local(path: Path) -> dict[str, Path]:
    """See `prebuilt_layouts`."""
    found = {name: shards.check_inside(path, path / name) for name in FILES if plain_file.is_there(path / name)}
    if MODEL in found:
        ctranslate2_bin.read(found[MODEL])
    return found


def remote(repository: str, names: Iterable[str], file: str | None) -> dict[str, str]:
    """See `prebuilt_layouts`."""
    return {name: name for name in FILES if name in names}


def check(folder: Path, model: Path, layout: str) -> dict[str, Any]:
    """See `prebuilt_layouts`. The artifact's config.json does not give the model's sizes."""
    variables = ctranslate2_bin.read(folder / MODEL).variables
    config = shards.read_config(model / "config.json")
    embeddings = variables.get("decoder/embeddings/weight")
    layers = {name.split("/")[1] for name in variables if name.startswith("decoder/layer_")} - {"layer_norm"}
    found = [*(embeddings.shape if embeddings else ()), len(layers)]
    expected = [config.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")]  # GPT-2 has others
    if len(found) != 3 or any(mine not in (None, theirs) for mine, theirs in zip(expected, found, strict=True)):
        raise UserError(
            f"{folder}: is another model: vocabulary, width and layers are {found}, this model's {expected}"
        )
    if not (folder / VOCABULARY).is_file():
        raise UserError(f"{folder}: holds no {VOCABULARY}; convert the model with CTranslate2 4")
    ctranslate2_model.check(folder, config)
    words = shards.read_list(folder / VOCABULARY, selection.MAX_BYTES)
    if ours := same_model.tokens(model):
        same_model.check_tokens(folder, {number: words[number] for number in ours if number < len(words)}, ours)
    types = sorted({variable.dtype for variable in variables.values() if len(variable.shape) == 2})
    return {
        "parameters": {"weights": ", ".join(types)},
        "weight_files": [MODEL],
        "weight_bytes_per_token": ctranslate2_bin.bytes_per_token(variables),
    }


def gate_layout(folder: Path) -> str | None:
    """See `prebuilt_layouts`. None for integers other than int8."""
    variables = ctranslate2_bin.read(folder / MODEL).variables.values()
    integers = {variable.dtype for variable in variables if len(variable.shape) == 2 and "int" in variable.dtype}
    return "source" if not integers else "ct2" if integers == {"int8"} else None
