"""The architecture that a model library is compiled for: its sizes, and its parameters by name."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.common import special_tokens
from quantmill.common.program import UserError
from quantmill.mlc import chat_config
from quantmill.mlc.parameters import LAYOUTS, Stored, model_parameters, stored, total_shape
from quantmill.mlc.source_config import FAMILIES, LLAMA3, Shape, SourceConfig

QUANTIZATION = "q4f16_1"  # of the library
MULTIPLE = 32  # that every width except the vocabulary's must be; all published models' are


@dataclass(frozen=True)
class Architecture(Shape):
    """A decoder of the Llama family: RMS norms, rotary positions, grouped queries, a gated SiLU perceptron."""

    model_type: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, float], ...]  # llama3's four numbers by name, or empty

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused projection."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    def frequencies(self) -> np.ndarray:
        """Radians a position of each pair of a head's dimensions that is rotated; float32 [head_dim / 2].

        theta**(-2i / head_dim); Llama 3 divides those of waves longer than a part of its first context, with a smooth
        step between (transformers, modeling_rope_utils).
        """
        plain = self.rope_theta ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        if not self.rope_scaling:
            return plain.astype(np.float32)
        scaling = dict(self.rope_scaling)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (plain * (smooth + (1 - smooth) / scaling["factor"])).astype(np.float32)

    def parameters(self) -> Stored:
        """Map each parameter of the format, in the model's order, to its shape and dtype."""
        found: Stored = {}
        for name, suffix, parts, quantized in model_parameters(self, LAYOUTS[QUANTIZATION]):
            found |= stored(name, suffix, total_shape(parts.values()), quantized)
        return found


def of(config: SourceConfig, path: Path) -> Architecture:
    """Return the architecture of a checkpoint, from its config.json at `path`.

    Raises `UserError` for widths that the library's kernels do not support.
    """
    found = Architecture(
        **{each.name: getattr(config, each.name) for each in fields(Shape)},
        model_type=config.family.model_type,
        rms_norm_eps=float(config.rms_norm_eps),
        rope_theta=float(config.rope_theta),
        rope_scaling=_numbers(config.rope_scaling),
    )
    for key in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(found, key) % MULTIPLE:
            size = getattr(found, key)
            raise UserError(f"{path}: {key} is {size}, and the model library needs a multiple of {MULTIPLE}")
    return found


@dataclass(frozen=True)
class Served:
    """The content of an artifact's mlc-chat-config.json, for an engine."""

    architecture: Architecture
    context: int  # positions
    stop_ids: list[int]


def of_artifact(folder: Path) -> Served:
    """Read an artifact's mlc-chat-config.json. Raises `UserError` if it is damaged, or of another architecture."""
    path = folder / chat_config.NAME
    content: dict[str, Any] = shards.read_json(path)
    try:
        model = content["model_config"]
        family = {each.model_type: each for each in FAMILIES.values()}[content["model_type"]]
        heads = model["num_attention_heads"]
        found = Architecture(
            model_type=family.model_type,
            **{key: model[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")},
            num_attention_heads=heads,
            num_key_value_heads=model["num_key_value_heads"],
            head_dim=model.get("head_dim") or model["hidden_size"] // heads,
            rms_norm_eps=float(model["rms_norm_eps"]),
            tie_word_embeddings=model.get("tie_word_embeddings", False),
            rope_theta=float(model.get("position_embedding_base") or model["rope_theta"]),
            rope_scaling=_numbers(model.get("rope_scaling")),
            qkv_name=family.qkv,
            qkv_bias=family.biased,
        )
        stop_ids = special_tokens.select(content["eos_token_id"], found.vocab_size)
        return Served(found, content["context_window_size"], stop_ids)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error!r:.80}); build the artifact again") from None


def _numbers(scaling: dict[str, Any] | None) -> tuple[tuple[str, float], ...]:
    return tuple((key, float(scaling[key])) for key in LLAMA3) if scaling else ()
