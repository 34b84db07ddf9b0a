"""How a config.json spells a mixture of experts: how many there are, and how many a token is sent to."""

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
USED = "num_experts_per_tok"
