"""GPTQ and AWQ: a model's folder with safetensors, in which matrices are packed, and a quantization_config."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoint import same_model, shards
from checkpoint.selection import select
from common.program import UserError, printable
from prebuilt import MAX_WORD, plain

QUANTIZE_CONFIG = "quantize_config.json"  # where auto-gptq reads what the others have in config.json
PARAMETERS = ("bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "zero_point", "version")


def local(path: Path) -> dict[str, Path]:
    """See `prebuilt`."""
    found = shards.find(path)
    files = [*found.files, *filter(None, [found.index()]), *found.others()]
    files += [each for each in [path / QUANTIZE_CONFIG] if each.is_file()]
    return {file.name: file for file in files}


def remote(repository: str, names: Iterable[str], file: str | None) -> dict[str, str]:
    """See `prebuilt`."""
    return {name: name for name in select(repository, names)}


def beside(model: Path) -> list[Path]:
    """See `prebuilt`."""
    return []


def check(folder: Path, model: Path, layout: str) -> dict[str, Any]:
    """See `prebuilt`."""
    same_model.check_config(folder, model)
    theirs, ours = (same_model.tokens(each / same_model.TOKENIZER) for each in (folder, model))
    if theirs and ours:
        same_model.check_tokens(folder, theirs, ours)
    found = shards.find(folder)
    if found.form != "safetensors":
        raise UserError(f"{folder}: its weights are pickled ({found.form}); name an artifact with safetensors")
    words = quantization(folder, layout)
    stored = same_model.check_packed(folder, layout, words, shards.find(model))
    table = stored["model.embed_tokens.weight"].nbytes if "lm_head.weight" in stored else 0
    return {
        "tool": tool(words),
        "parameters": plain({name: words[name] for name in PARAMETERS if name in words}),
        "weight_files": [file.name for file in found.files],
        "weight_bytes_per_token": sum(tensor.nbytes for tensor in stored.values()) - table,
    }


def gate_layout(folder: Path, layout: str) -> str:
    """See `prebuilt`."""
    return layout


def quantization(folder: Path, layout: str) -> dict[str, Any]:
    """What a GPTQ or AWQ folder says of its weights. Raises `UserError` where that is another layout."""
    found = shards.read_config(folder / "config.json").get("quantization_config")
    if not isinstance(found, dict):
        raise UserError(
            f"{folder}: its config.json has no quantization_config; where {QUANTIZE_CONFIG} says it, put that there"
        )
    if (folder / QUANTIZE_CONFIG).is_file():
        other = shards.read_json(folder / QUANTIZE_CONFIG)
        if wrong := [name for name in PARAMETERS if name in found and name in other and found[name] != other[name]]:
            raise UserError(
                f"{folder}: config.json and {QUANTIZE_CONFIG} name another {wrong[0]}; one of them is wrong"
            )
    method = found.get("quant_method")
    if method != layout:
        raise UserError(f"{folder}: its quantization_config says {method!r}, not {layout!r}; name its own layout")
    return found


def tool(words: Mapping[str, Any]) -> str:
    """What built an artifact, as far as it says so."""
    meta = words.get("meta")
    named = meta.get("quantizer") if isinstance(meta, dict) else None
    return printable(", ".join(map(str, named))[:MAX_WORD]) if isinstance(named, list) and named else "unknown"
