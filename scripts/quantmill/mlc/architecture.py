"""The architecture that a model library is compiled for: its sizes, and its parameters by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmill.checkpoint import shards
from quantmill.common import special_tokens
from quantmill.common.program import UserError
from quantmill.mlc import chat_config
from quantmill.mlc.quantize import GROUP
from quantmill.mlc.source_config import FAMILIES, LLAMA3, SourceConfig

MULTIPLE = 32  # that every width except the vocabulary's must be; all published models' are


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
    rope_scaling: tuple[tuple[str, float], ...]  # llama3's four numbers by name, or empty
    qkv_name: str  # MLC-LLM's name of the fused projection
    qkv_bias: bool

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused projection."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    def parameters(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Map each parameter of the format, in the model's order, to its shape and dtype."""
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


def of(config: SourceConfig, path: Path) -> Architecture:
    """Return the architecture of a checkpoint whose config.json, at `path`, was understood.

    Raises `UserError` for widths that the library's kernels do not support.
    """
    found = Architecture(
        model_type=config.family.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=float(config.rms_norm_eps),
        tie_word_embeddings=config.tied,
        rope_theta=float(config.rope_theta),
        rope_scaling=_numbers(config.rope_scaling),
        qkv_name=config.family.qkv,
        qkv_bias=config.family.biased,
    )
    for key in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(found, key) % MULTIPLE:
            raise UserError(
                f"{path}: {key} is {getattr(found, key)}, and the model library needs a multiple of {MULTIPLE}"
            )
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
