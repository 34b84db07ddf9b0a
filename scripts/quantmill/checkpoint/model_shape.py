"""The number of weights of a model, and the matrices that they are in, from its config.json alone."""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmill.checkpoint import EXPERTS
from quantmill.common import bounded_json, plain_file
from quantmill.common.model_config import MAX_CONFIG
from quantmill.common.program import UserError

LARGEST = 2**32  # of any size; larger ones are mistakes


@dataclass(frozen=True)
class Kind:
    """Differences of a model type from Llama's layers; defaults are those of its class in transformers."""

    qkv_bias: bool = False
    norms: int = 2  # of a block, as wide as the hidden state
    qk_norm: bool = False
    tied: bool = False
    head_dim: int | None = None


KINDS = {
    "llama": Kind(),
    "mistral": Kind(),
    "mixtral": Kind(),
    "phi3": Kind(),
    "qwen2": Kind(qkv_bias=True),
    "qwen3": Kind(qk_norm=True, head_dim=128),
    "qwen3_moe": Kind(qk_norm=True),
    "gemma": Kind(tied=True, head_dim=256),
    "gemma2": Kind(tied=True, head_dim=256, norms=4),
}


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes, in weights. `exact` is False for model types that are not in `KINDS`: the sizes then
    approximate a model of Llama's layers."""

    parameters: int
    embeddings: int  # and an untied head
    block: int  # matrices of one block
    layers: int
    hidden: int
    heads: int
    vocab: int
    context: int | None
    rows: int  # of all matrices, embeddings and head included; each has a scale in CTranslate2's int8
    inputs: int  # summed input widths of the blocks' matrices; GPTQ stores an order of them
    exact: bool


def of(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape that a config.json describes; None if it lacks the sizes of a decoder."""
    try:
        config = config.get("text_config") or config
        return _decoder(config, KINDS.get(config.get("model_type", "")))
    except (AttributeError, TypeError, ZeroDivisionError):
        return None


def _size(config: Mapping[str, Any], name: str, default: int | None) -> int:
    """Return a size, or its default if it is absent. Raises `TypeError` for what is not a size."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise TypeError(name)
    return value


def _decoder(config: Mapping[str, Any], kind: Kind | None) -> Shape:
    exact, kind = kind is not None, kind or Kind()
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    hidden, heads, layers, vocab = (_size(config, name, None) for name in names)
    head_dim = _size(config, "head_dim", kind.head_dim or hidden // heads)
    queries, keys = heads * head_dim, _size(config, "num_key_value_heads", heads) * head_dim
    experts = next(filter(None, (_size(config, name, 0) for name in EXPERTS)), 0)
    inner = _size(config, "intermediate_size", 4 * hidden)
    if experts:
        inner = _size(config, "moe_intermediate_size", inner)
    copies = experts or 1
    router = experts * hidden
    block = hidden * (2 * queries + 2 * keys) + 3 * copies * hidden * inner
    biases = queries + 2 * keys if kind.qkv_bias or config.get("attention_bias") else 0
    biases += hidden if config.get("attention_bias") and not kind.qkv_bias else 0
    biases += copies * (2 * inner + hidden) if config.get("mlp_bias") else 0
    norms = kind.norms * hidden + (2 * head_dim if kind.qk_norm else 0)
    tables = 1 if config.get("tie_word_embeddings", kind.tied) else 2
    return Shape(
        parameters=tables * vocab * hidden + layers * (block + router + biases + norms) + hidden,
        embeddings=tables * vocab * hidden,
        block=block,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        context=_size(config, "max_position_embeddings", 0) or None,
        rows=tables * vocab + layers * (queries + 2 * keys + hidden + copies * (2 * inner + hidden)),
        inputs=layers * (3 * hidden + queries + copies * (2 * hidden + inner)),
        exact=exact,
    )


def of_weights(nbytes: int) -> Shape:
    """Return a stand-in for a model whose config.json gives no sizes: its bytes of float16, all in one block."""
    return Shape(nbytes // 2, 0, nbytes // 2, 1, 0, 0, 0, None, 0, 0, exact=False)


def of_config(folder: Path) -> Shape | None:
    """Return the shape of a folder's config.json; None if it is absent or gives no sizes, as in some formats."""
    path = folder / "config.json"
    try:
        return of(bounded_json.loads(plain_file.read(path, MAX_CONFIG), MAX_CONFIG)) if path.is_file() else None
    except (ValueError, UserError):  # the job that reads it reports that
        return None


def of_folder(folder: Path) -> Shape:
    """Return the shape of the model in a folder: from its config.json, else from the size of its weight files. Raises
    `FileNotFoundError` with the folder's own name if there is no such model yet. By that name Snakemake sees that the
    input is still to be made, and asks again."""
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    found = of_config(folder)
    if found is not None:
        return found
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    return of_weights(sum(path.stat().st_size for path in weights))
