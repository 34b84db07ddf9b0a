"""The layers of a model by its config, as far as they keep keys and values of tokens."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from quantmill.metrics.footprint import Layers

WINDOWS = {"full_attention": False, "sliding_attention": True}  # types of layers, and whether they have a window
# config keys of models with another cache: Falcon, Jamba, Bamba, RecurrentGemma, Llama 4, Gemma 4, DeepSeek-V3.2, MiMo
OTHER_CACHES = {"multi_query", "num_kv_heads", "attn_layer_period", "attn_layer_indices", "block_types", "index_topk"}
OTHER_CACHES |= {"layers_block_type", "attention_window_size", "attention_chunk_size", "global_head_dim"}
OTHER_CACHES |= {"swa_head_dim", "swa_num_key_value_heads"}
OTHER_PARTS = ("mamba", "hybrid", "ssm")  # of such keys
LATENT = ("deepseek_v2", "deepseek_v3")  # types of models of which engines keep latents


def of_config(config: Mapping[str, Any], value_bytes: int, shards: int = 1) -> list[Layers] | None:
    """Return the layers; None for a model in which some layer keeps anything else.

    Args:
        config: the language model's keys as transformers completes them, with the defaults of its class.
        shards: GPUs that divide the heads, each of which has one at least; the layers are of all together.
    """
    window = config.get("sliding_window")
    alike = ["full_attention" if window is None else "sliding_attention"] * (config.get("num_hidden_layers") or 0)
    types = config.get("layer_types") or alike
    if shared := config.get("num_kv_shared_layers"):  # the last layers use the keys of others
        types = types[:-shared]
    values = _values(config, shards)
    if not values or not types or not WINDOWS.keys() >= set(types) or _has_other_cache(config):
        return None
    return [
        Layers(count, values * value_bytes, window if WINDOWS[kind] else None) for kind, count in Counter(types).items()
    ]


def _values(config: Mapping[str, Any], shards: int) -> int:
    """Return the numbers that a token leaves in a layer; 0 where they are not known."""
    if rank := config.get("kv_lora_rank"):  # vLLM and transformers 5 keep what keys and values are made of
        return (rank + config["qk_rope_head_dim"]) * shards if config.get("model_type") in LATENT else 0
    heads = config.get("num_attention_heads") or 0
    groups = max(config.get("num_key_value_heads") or heads, shards)
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // max(1, heads)
    return 2 * groups * width if heads and config.get("v_head_dim") in (None, width) else 0


def _has_other_cache(config: Mapping[str, Any]) -> bool:
    """Return whether a key with a value names a cache that is not of keys and values alone."""
    return any(
        value and (key in OTHER_CACHES or any(part in key for part in OTHER_PARTS)) for key, value in config.items()
    )
