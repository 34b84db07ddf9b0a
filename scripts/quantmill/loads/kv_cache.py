"""Bytes of a server's KV cache for each token."""

from pathlib import Path
from typing import Any

from quantmill.checkpoint import ggml_types, shards

# bytes of a value, by the names of types in vLLM, transformers and llama.cpp
NAMED = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
VALUE_BYTES = NAMED | {each.name.lower(): each.nbytes / each.block for each in ggml_types.TYPES.values()}
AUTO = "auto"  # the compute type
# config keys of models with another cache: Falcon, Jamba, Bamba, RecurrentGemma, Llama 4, Gemma 3n
OTHER_CACHES = {"multi_query", "num_kv_heads", "attn_layer_period", "attn_layer_indices", "block_types", "kv_lora_rank"}
OTHER_CACHES |= {"layers_block_type", "attention_window_size", "attention_chunk_size", "num_kv_shared_layers"}
OTHER_LAYERS = ("mamba", "hybrid")  # parts of such keys


def bytes_per_token(artifact: Path, compute_type: str, kind: str = AUTO) -> int | None:
    """Return the bytes of keys and values for each token, by the shape in the artifact's config.json.

    `kind`: the cache's type by the server's name, or two types, of keys and of values: "q8_0, f16". None without a
    config.json, for an unknown type, and for models in which some layer shares a cache, has a window or keeps a state.
    """
    path = artifact / "config.json"
    config = shards.read_config(path) if path.is_file() else {}
    heads = config.get("num_attention_heads")
    given = (
        config.get("num_hidden_layers"),
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("hidden_size"),
    )
    sizes = [each for each in given if type(each) is int and each > 0]
    if len(sizes) < len(given) or _has_other_cache(config):
        return None
    layers, heads, keys, hidden = sizes
    of_keys, _, of_values = (compute_type if kind == AUTO else kind).partition(", ")
    types = of_keys, of_values or of_keys
    if not VALUE_BYTES.keys() >= set(types):
        return None
    width = config.get("head_dim") or hidden // heads
    return round(layers * keys * width * sum(VALUE_BYTES[each] for each in types))


def _has_other_cache(config: dict[str, Any]) -> bool:
    """Return whether some layer keeps anything but keys and values of all tokens, by transformers' names."""
    window = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    layers = set(map(str, config.get("layer_types") or ()))
    set_ = [key for key, value in config.items() if value]
    other = any(key in OTHER_CACHES or any(part in key for part in OTHER_LAYERS) for key in set_)
    return bool(window or other or layers - {"full_attention"})
