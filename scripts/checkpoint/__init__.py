"""Checkpoints on disk: torch zip files, safetensors files, and folders of shards with an index.

Readers find where each tensor's bytes lie and hold none of them; writers copy them in pieces. No tensor is ever whole
in memory.
"""

# where a config.json keeps the number of a block's experts: Mixtral, Qwen3-MoE, DeepSeek
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
