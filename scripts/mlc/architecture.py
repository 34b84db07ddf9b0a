"""Which transformer a folder holds: the numbers that a model library is compiled for, and its parameters by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import shards
from common.program import UserError

GROUP = 32  # weights that share a scale
MULTIPLE = 32  # of which every width but the vocabulary's must be one; all published models are
CONFIGS = ("mlc-chat-config.json", "config.json")
# model_type -> MLC-LLM's name of the fused q, k and v projection, and whether it has a bias
ATTENTION = {"llama": ("qkv_proj", False), "mistral": ("qkv_proj", False), "qwen2": ("c_attn", True)}
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama family: RMS norms, rotary positions, grouped queries, a gated SiLU perceptron."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: tuple[tuple[str, float], ...]  # llama3's four numbers by name, or none

    @property
    def qkv_name(self) -> str:
        """What MLC-LLM calls the fused projection."""
        return ATTENTION[self.model_type][0]

    @property
    def qkv_bias(self) -> bool:
        """Whether that projection has a bias."""
        return ATTENTION[self.model_type][1]

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused projection."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    def parameters(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Every parameter of the format, in the model's order: name -> (shape, dtype)."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}

        def matrix(name: str, outputs: int, inputs: int) -> None:
            found[f"{name}.q_weight"] = (outputs, inputs // 8), "uint32"
            found[f"{name}.q_scale"] = (outputs, inputs // GROUP), "float16"

        def vector(name: str, size: int) -> None:
            found[name] = (size,), "float16"

        matrix("model.embed_tokens", self.vocab_size, self.hidden_size)
        for layer in (f"model.layers.{number}" for number in range(self.num_hidden_layers)):
            vector(f"{layer}.input_layernorm.weight", self.hidden_size)
            matrix(f"{layer}.self_attn.{self.qkv_name}", self.qkv_size, self.hidden_size)
            if self.qkv_bias:
                vector(f"{layer}.self_attn.{self.qkv_name}.bias", self.qkv_size)
            matrix(f"{layer}.self_attn.o_proj", self.hidden_size, self.num_attention_heads * self.head_dim)
            vector(f"{layer}.post_attention_layernorm.weight", self.hidden_size)
            matrix(f"{layer}.mlp.gate_up_proj", 2 * self.intermediate_size, self.hidden_size)
            matrix(f"{layer}.mlp.down_proj", self.hidden_size, self.intermediate_size)
        vector("model.norm.weight", self.hidden_size)
        if not self.tie_word_embeddings:
            matrix("lm_head", self.vocab_size, self.hidden_size)
        return found


def find_config(path: Path) -> Path:
    """The config of an artifact's or a checkpoint's folder, or the file that is named."""
    return (
        next((path / name for name in CONFIGS if (path / name).is_file()), path / "config.json")
        if path.is_dir()
        else path
    )


def read(path: Path) -> Architecture:
    """The architecture that a folder's config, MLC-LLM's or transformers', describes.

    Raises `UserError` by name for what the library does not do.
    """
    path = find_config(path)
    content = shards.read_json(path)
    config: dict[str, Any] = content | content.get("model_config", {})
    model_type = config.get("model_type")
    if model_type not in ATTENTION:
        raise UserError(
            f"{path}: model_type {model_type!r} has no model library; "
            f"mlc-q4f16_1 runs {', '.join(ATTENTION)}: leave the format out for this model"
        )
    try:
        return _architecture(path, config)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is no config of a {model_type} model ({error!r:.80}); download it again") from None


def _architecture(path: Path, config: dict[str, Any]) -> Architecture:
    heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    theta, scaling = _rope(path, config)
    found = Architecture(
        model_type=config["model_type"],
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_hidden_layers=int(config["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden_size // heads),
        vocab_size=int(config["vocab_size"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_scaling=scaling,
    )
    for key, wanted in (("hidden_act", "silu"), ("mlp_bias", False)):
        if config.get(key, wanted) != wanted:
            raise UserError(f"{path}: {key} is {config[key]!r}, and the model library does {wanted!r} alone")
    if config.get("attention_bias", found.qkv_bias) != found.qkv_bias:
        raise UserError(f"{path}: attention_bias is {config['attention_bias']!r}, which {found.qkv_name} has not")
    for key in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(found, key) < 1 or getattr(found, key) % MULTIPLE:
            raise UserError(
                f"{path}: {key} is {getattr(found, key)}, and the model library wants a multiple of {MULTIPLE}"
            )
    if found.num_key_value_heads < 1 or heads % found.num_key_value_heads:
        raise UserError(f"{path}: {heads} attention heads cannot share {found.num_key_value_heads} key-value heads")
    return found


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Rotary positions' base, and llama3's scaling where there is one, in any of the spellings that are about."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    theta = config.get("position_embedding_base") or config.get("rope_theta") or parameters.get("rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(theta), ()
    if kind != "llama3":
        raise UserError(f"{path}: rope scaling {kind!r} is not in the model library; it knows 'default' and 'llama3'")
    return float(theta), tuple((key, float(scaling[key])) for key in LLAMA3_KEYS)


def stop_ids(folder: Path, vocab_size: int) -> list[int]:
    """End-of-sequence ids of a folder's config. A cut vocabulary may lack them."""
    stop = shards.read_json(find_config(folder)).get("eos_token_id")
    return [token for token in ([stop] if isinstance(stop, int) else list(stop or [])) if token < vocab_size]


def context_length(folder: Path) -> int:
    """Positions that attend to all before them: the context, or the sliding window where that is shorter."""
    content = shards.read_json(find_config(folder))
    config = content | content.get("model_config", {})
    context = int(config.get("context_window_size") or config["max_position_embeddings"])
    window = config.get("sliding_window_size") or config.get("sliding_window") or -1
    slides = int(window) > 0 and config.get("use_sliding_window", True)
    return min(context, int(window)) if slides else context
