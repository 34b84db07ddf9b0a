"""Checkpoints on disk: torch zips, safetensors, GGUF, CTranslate2's model.bin, and folders of shards with an index.

Readers find where each tensor's bytes lie and keep none of them; writers copy them in pieces. No tensor is ever whole
in memory.
"""

from collections.abc import Mapping
from typing import Any

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of Llama and its kin
# ends of the names of embedding tables
TABLES = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight")
# keys of config.json: the number of experts of a layer (Mixtral, Qwen3-MoE, DeepSeek, ERNIE), and the number that each
# token is routed to (most models; ERNIE, LongCat, Gemma 4)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
# parts of tensors' names: experts (the last two are Granite's), and towers that read images or sound
EXPERT_PARTS = (".experts.", ".block_sparse_moe.input_linear.", ".block_sparse_moe.output_linear.")
TOWERS = ("vision", "visual", "audio", "projector")
ROWS = ("embed_tokens_per_layer.weight",)  # Gemma 3n's further tables, of which a token reads one row


def reads_more_than_text(name: str) -> bool:
    """Return whether a tensor belongs to a part that reads images or sound, which a text never reaches."""
    return any(part in name for part in TOWERS)


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Return whether a model routes each token to some of several experts. `config`: the language model's keys."""
    return any(config.get(name) not in (None, 0, 1) for name in EXPERTS)


def share_read(name: str, config: Mapping[str, Any]) -> float:
    """Return the share of a tensor that decoding one token of text reads. It is 1, or used / total for experts, or 0
    for towers and for tables of which a row is read. `config`: the language model's keys."""
    if reads_more_than_text(name) or name.endswith(ROWS):
        return 0
    if not any(part in name for part in EXPERT_PARTS):
        return 1
    experts, used = (next(filter(None, map(config.get, names)), None) for names in (EXPERTS, EXPERTS_USED))
    return used / experts if experts and used else 1
