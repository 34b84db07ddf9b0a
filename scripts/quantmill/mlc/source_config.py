"""The config.json of checkpoints that MLC's format supports; others are refused by the name of what it lacks.

MLC-LLM's models are in its python/mlc_llm/model/{llama,mistral,qwen2}.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmill.common.program import UserError


@dataclass(frozen=True)
class Family:
    """A family of models in MLC-LLM (python/mlc_llm/model/NAME).

    Attributes:
        model_type: MLC-LLM's name, which is transformers' too.
        qkv: its name of the fused query, key and value projection.
        biased: whether these have biases.
        may_tie: whether the embeddings can also be the head.
        scales_rope: whether it supports a scaling of rotary embeddings (llama3's).
        max_prefill: the default of the tokens that it prefills at once.
        attention_sink: tokens that a sliding window keeps (-1: not supported).
    """

    model_type: str
    qkv: str = "qkv_proj"
    biased: bool = False
    may_tie: bool = True
    scales_rope: bool = False
    max_prefill: int = 8192
    attention_sink: int = -1


FAMILIES = {
    "LlamaForCausalLM": Family("llama", scales_rope=True),
    "MistralForCausalLM": Family("mistral", may_tie=False, attention_sink=4),
    "Qwen2ForCausalLM": Family("qwen2", qkv="c_attn", biased=True, max_prefill=2048),
}
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
MAX_SIZE = 2**31
LLAMA3 = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
# keys of a config that may make it another model, and the values that do not
UNMODELLED = {
    "quantization_config": (None,),
    "auto_map": (None,),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (None, 1, 1.0),
}


@dataclass(frozen=True)
class Shape:
    """Sizes that determine a model's tensors, in transformers' words."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_name: str  # MLC-LLM's name of the fused projection
    qkv_bias: bool


@dataclass(frozen=True)
class SourceConfig(Shape):
    """The content of a config.json; `rope_scaling` is None or of type llama3."""

    family: Family
    context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None


def read(config: dict[str, Any], path: Path) -> SourceConfig:
    """Read a config.json.

    Args:
        path: the config's, for errors.

    Raises `UserError` for another architecture, for a feature that MLC-LLM's model of this one lacks, and for sizes
    that are missing or cannot be.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise _refuse(path, f"architecture {name!r:.60} is not modelled for MLC, only {', '.join(FAMILIES)}")
    _check_features(config, family, path)
    sizes = {key: _size(config, key, path) for key in SIZES}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    key_value_heads = _size(config, "num_key_value_heads", path, heads)
    head_dim = _size(config, "head_dim", path, hidden // heads)
    if hidden % heads or heads % key_value_heads:
        raise _refuse(path, f"hidden_size {hidden} and {key_value_heads} of {heads} heads do not divide evenly")
    if family.model_type == "qwen2" and head_dim * heads != hidden:
        raise _refuse(path, f"head_dim {head_dim} times {heads} heads is not hidden_size {hidden}, as in MLC's qwen2")
    epsilon: Any = config.get("rms_norm_eps")
    if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
        raise UserError(f"{path}: rms_norm_eps is {epsilon!r:.60}, not a number; download it again")
    theta, scaling = rope(config, path)
    if scaling is not None and not family.scales_rope:
        raise _refuse(path, f"rope_scaling {scaling.get('rope_type')!r} is not modelled for MLC's {family.model_type}")
    return SourceConfig(
        family=family,
        qkv_name=family.qkv,
        qkv_bias=family.biased,
        **sizes,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        context=_size(config, "max_position_embeddings", path),
        rms_norm_eps=epsilon,
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),  # the three families' default is False
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _refuse(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what:.200}; leave mlc out of this model's formats")


def _check_features(config: dict[str, Any], family: Family, path: Path) -> None:
    """Raise `UserError` for a feature that MLC-LLM's model of this family lacks."""
    suffix = f"not modelled for MLC's {family.model_type}"
    for key, values in UNMODELLED.items():
        if config.get(key, values[0]) not in values:
            raise _refuse(path, f"{key} {config[key]!r:.60} is {suffix}")
    if config.get("attention_bias") not in (None, family.biased):
        raise _refuse(path, f"attention_bias {config['attention_bias']!r:.60} is {suffix}")
    layer_types = config.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise _refuse(path, f"layer_types {layer_types!r:.60} are {suffix}")
    window = config.get("sliding_window")
    if family.model_type == "mistral" and window is not None:
        raise _refuse(path, f"sliding_window {window!r:.60} is {suffix}")
    if config.get("tie_word_embeddings", False) and not family.may_tie:
        raise _refuse(path, f"tie_word_embeddings is set, and MLC's {family.model_type} has a head of its own")


def _size(config: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < MAX_SIZE:
        raise UserError(f"{path}: {key} is {value!r:.60}, not a size; download it again")
    return value


def rope(config: dict[str, Any], path: Path) -> tuple[float, dict[str, Any] | None]:
    """Return the base and the scaling of rotary embeddings, in the spelling of transformers 4 or 5 (`rope_parameters`).

    Raises `UserError` if the two spellings differ, and for a scaling other than llama3's, which MLC-LLM either fails on
    or ignores.
    """
    spellings = []
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        spellings.append((parameters.get("rope_theta"), _scaling(parameters, path)))
    if config.get("rope_theta") is not None or config.get("rope_scaling") is not None:
        spellings.append((config.get("rope_theta"), _scaling(config.get("rope_scaling") or {}, path)))
    bases = {theta for theta, _ in spellings if theta is not None}
    if len(bases) > 1 or any(scaling != spellings[0][1] for _, scaling in spellings):
        raise UserError(f"{path}: rope_parameters differ from rope_theta and rope_scaling; remove the wrong one")
    theta = bases.pop() if bases else 10000
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise UserError(f"{path}: rope_theta is {theta!r:.60}, not a base; download it again")
    return theta, spellings[0][1] if spellings else None


def _scaling(parameters: Any, path: Path) -> dict[str, Any] | None:
    if not isinstance(parameters, dict):
        raise UserError(f"{path}: rope_scaling is {parameters!r:.60}, not an object; download it again")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise _refuse(path, f"rope_scaling of type {kind!r:.60} is not modelled for MLC, only llama3")
    missing = [key for key in LLAMA3 if type(parameters.get(key)) not in (int, float)]
    if missing:
        raise UserError(f"{path}: rope_scaling of type llama3 lacks {', '.join(missing)}; download it again")
    return {key: parameters[key] for key in LLAMA3} | {"rope_type": "llama3"}
