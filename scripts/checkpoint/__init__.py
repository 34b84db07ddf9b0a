"""Checkpoints on disk: torch zip files, safetensors files, and folders of shards with an index.

Readers find where each tensor's bytes lie and hold none of them; writers copy them in pieces. No tensor is ever whole
in memory.
"""

from collections.abc import Mapping
from typing import Any

# where a config.json keeps the number of a block's experts: Mixtral, Qwen3-MoE, DeepSeek
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def share_read(name: str, config: Mapping[str, Any]) -> float:
    """How much of a model's tensor `name` a token reads: all, and of a mixture's experts those that it is sent to."""
    if ".experts." not in name:
        return 1
    experts, used = next(filter(None, map(config.get, EXPERTS)), None), config.get("num_experts_per_tok")
    return used / experts if experts and used else 1
