"""Checkpoints on disk: torch zip files, safetensors files, and folders of shards with an index.

Readers find where each tensor's bytes lie and hold none of them; writers copy them in pieces. No tensor is ever whole
in memory.
"""

from collections.abc import Mapping
from typing import Any

# where a config.json keeps the number of a block's experts (Mixtral, Qwen3-MoE, DeepSeek, ERNIE), and how many of them
# a token is sent to (most; ERNIE, LongCat, Gemma 4)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SENT_TO = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
OF_EXPERTS = (".experts.", ".block_sparse_moe.input_linear.", ".block_sparse_moe.output_linear.")  # the last: Granite
OTHER_PARTS = ("vision", "visual", "audio", "projector")  # of a model that reads more than text
ROWS = ("embed_tokens_per_layer.weight",)  # tables beside the embeddings, of which a token reads a row: Gemma 3n


def reads_more_than_text(name: str) -> bool:
    """Whether a tensor of this name is of a part that a text never reaches."""
    return any(part in name for part in OTHER_PARTS)


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a model has several experts, of which a token is sent to some. `config`: that of the text."""
    return any(config.get(name) not in (None, 0, 1) for name in EXPERTS)


def share_read(name: str, config: Mapping[str, Any]) -> float:
    """How much of a model's tensor `name` a token of a text reads: all; of a mixture's experts those that it is sent
    to; nothing of parts that see or hear, and a row of a table, which is not counted. `config`: that of the text."""
    if reads_more_than_text(name) or name.endswith(ROWS):
        return 0
    if not any(part in name for part in OF_EXPERTS):
        return 1
    experts, used = (next(filter(None, map(config.get, names)), None) for names in (EXPERTS, SENT_TO))
    return used / experts if experts and used else 1
