"""GGUF: one file, or several of a split model, with the model's config and tokenizer next to it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np

from quantmill.checkpoint import gguf_file, gguf_names, shards
from quantmill.checkpoint.gguf_file import Gguf
from quantmill.checkpoint.gguf_header import Texts
from quantmill.common.program import UserError
from quantmill.fetch import same_model
from quantmill.fetch.prebuilt_layouts import plain
from quantmill.llamacpp import files
from quantmill.llamacpp.files import FLOATS

TOKENS = "tokenizer.ggml.tokens"
MAX_LAYERS = 512  # llama.cpp's
# key of GGUF, below its architecture's name -> of config.json, by the first of these names that it has
SIZES = {
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size_mlp", "intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
}
# model types that have the same name in llama.cpp, and those that have another; others are not checked
SAME_NAMES = (
    *("bloom", "cohere2", "exaone", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "glm4", "gpt2", "granite"),
    *("llama", "mpt", "nemotron", "olmo", "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen3", "smollm3", "stablelm"),
    "starcoder2",
)
OTHER_NAMES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
# the file's own keys that the manifest keeps
PARAMETERS = (
    *("general.file_type", "general.quantization_version", "general.quantized_by", "quantize.imatrix.dataset"),
    *("quantize.imatrix.entries_count", "quantize.imatrix.chunks_count"),
)


def local(path: Path) -> dict[str, Path]:
    """See `prebuilt_layouts`. The path is a folder with one model, or a file."""
    folder = path.parent
    if path.is_dir():
        folder, names = path, sorted(each.name for each in path.iterdir() if each.suffix == ".gguf")
        models = gguf_names.models(name for name in names if name.isprintable() and name[0] != ".")
        if len(models) != 1:
            found = f"{len(models)} models ({', '.join(model[0] for model in models)})" if models else "no .gguf file"
            raise UserError(f"{path}: holds {found}; name a .gguf file as path")
        path = path / models[0][0]
    parts = [shards.check_inside(folder, part) for part in gguf_file.parts(path)]
    gguf_file.read_all(path)
    return dict(zip(_names(parts), parts, strict=True))


def remote(repository: str, names: Iterable[str], file: str | None) -> dict[str, str]:
    """See `prebuilt_layouts`. A repository has files of many types, so one is named."""
    known = sorted(name for name in names if name.endswith(".gguf"))
    chosen = PurePosixPath(file or "")
    parts = [chosen.with_name(name) for name in gguf_names.split_names(chosen.name)] if chosen.name else []
    if not parts or not {str(each) for each in parts} <= {*known}:
        missing = f"not all of {file}" if len(parts) > 1 else f"no {file}" if parts else "files of many types"
        listed = f"name one of {', '.join(known)}" if known else "it has no .gguf file; name another repository"
        raise UserError(f"{repository}: holds {missing}; {listed}")
    return dict(zip(_names(parts), map(str, parts), strict=True))


def _names(parts: Sequence[PurePath]) -> list[str]:
    """Return the files' names in an artifact. Parts keep theirs, by which llama.cpp finds the others."""
    return [files.MODEL] if len(parts) == 1 else [part.name for part in parts]


def beside(model: Path) -> list[Path]:
    """See `prebuilt_layouts`."""
    return files.beside(model)


def check(folder: Path, model: Path, layout: str) -> dict[str, Any]:
    """See `prebuilt_layouts`."""
    found = gguf_file.read_all(files.first(folder))
    config = shards.read_config(model / "config.json")
    text = config.get("text_config")
    check_sizes(found, text if isinstance(text, dict) else config)
    check_tokens(found, same_model.tokens(model))
    said = {key: found.metadata[key] for key in PARAMETERS if key in found.metadata}
    return {
        "parameters": plain(said) | {"tensors": files.types(found)},
        "weight_files": [file.name for file in found.files],
        "weight_bytes_per_token": files.bytes_per_token(found),
    }


def gate_layout(folder: Path) -> str:
    """See `prebuilt_layouts`."""
    return "source" if FLOATS.keys() >= files.types(gguf_file.read_all(files.first(folder))).keys() else "gguf"


def check_sizes(found: Gguf, config: Mapping[str, Any]) -> None:
    """Raise `UserError` if a file's architecture, sizes or number of tokens are not those of a config.json."""
    kind, architecture = config.get("model_type"), found.metadata.get("general.architecture")

    def size(key: str) -> Any:
        return found.metadata.get(f"{architecture}.{key}")

    more = size("nextn_predict_layers")
    facts = [("general.architecture", architecture, kind if kind in SAME_NAMES else OTHER_NAMES.get(str(kind)))]
    for key, names in SIZES.items():
        theirs, mine = size(key), next((config[name] for name in names if type(config.get(name)) is int), None)
        if key == "block_count" and type(theirs) is type(more) is int:
            theirs -= more  # multi-token prediction layers
        if key == "attention.head_count_kv":
            mine = mine if size("attention.kv_lora_rank") is None else None  # DeepSeek, which llama.cpp runs with one
            theirs = size("attention.head_count") if theirs is None else theirs
        if mine is not None and isinstance(theirs, np.ndarray) and np.isin(theirs, (mine, 0)).all():
            theirs = mine  # one for each layer, 0 where it has no attention
        facts.append((key, theirs, mine))
    tokens = found.metadata.get(TOKENS)
    count = len(tokens) if isinstance(tokens, Texts) else size("vocab_size")
    facts.append(("number of tokens", count, config.get("vocab_size")))
    for what, theirs, mine in facts:
        if mine is not None and (isinstance(theirs, (Texts, np.ndarray)) or theirs != mine):
            raise UserError(f"{found.path}: is another model: its {what} is {theirs!s:.60}, this model's {mine}")
    layers = size("block_count")
    if type(layers) is not int or layers > MAX_LAYERS:
        raise UserError(
            f"{found.path}: its block_count is {layers!s:.60}, and llama.cpp has {MAX_LAYERS} layers; refused"
        )
    table, sizes = found.tensors.get("token_embd.weight"), [count, size("embedding_length")]
    if table is None or list(map(str, table.shape)) != list(map(str, sizes)):
        shape = list(table.shape) if table else "missing"
        raise UserError(f"{found.path}: its token_embd.weight is {shape}, its metadata's {sizes!s:.60}; refused")


def check_tokens(found: Gguf, ours: Mapping[int, str] | None) -> None:
    """Raise `UserError` if an id is another token in the file than in this model. Padding beyond the model's own tokens
    may have any name; a file without tokens has nothing to compare."""
    tokens = found.metadata.get(TOKENS)
    if tokens is None:
        return
    if not isinstance(tokens, Texts):
        raise UserError(f"{found.path}: its {TOKENS} is not an array of texts; convert the model again")
    for key in (
        "tokenizer.ggml.scores",
        "tokenizer.ggml.token_type",
    ):  # older versions of llama.cpp read beyond their end
        listed = found.metadata.get(key, tokens)
        if not isinstance(listed, (Texts, np.ndarray)) or len(listed) < len(tokens):
            raise UserError(f"{found.path}: its {key} is shorter than its {TOKENS}; convert the model again")
    for number, token in sorted((ours or {}).items()):
        theirs = {number: tokens[number]} if number < len(tokens) else {}
        if theirs != {number: token.replace("▁", " ")}:  # as llama.cpp's converter writes added tokens with spaces
            same_model.check_tokens(found.path, theirs, {number: token})
