"""How much a server keeps of each token that it has read: its keys and values."""

from pathlib import Path

from quantmill.checkpoint import ggml_types, shards

# bytes of a value, by what vLLM, transformers and llama.cpp call its type
NAMED = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
VALUE_BYTES = NAMED | {each.name.lower(): each.nbytes / each.block for each in ggml_types.TYPES.values()}
AUTO = "auto"  # the type that the server multiplies in
# keys of models whose layers keep another cache: Falcon, Jamba, Bamba, RecurrentGemma, Llama 4, Gemma 3n
OTHER_CACHES = (
    "multi_query",
    "num_kv_heads",
    "attn_layer_period",
    "attn_layer_indices",
    "block_types",
    "layers_block_type",
    "attention_window_size",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "kv_lora_rank",
)
OTHER_LAYERS = ("mamba", "hybrid")  # parts of such keys


def bytes_per_token(artifact: Path, compute_type: str, kind: str = AUTO) -> int | None:
    """Bytes of keys and values for each token, of a model whose layers all look at all tokens.

    `kind`: the type that the server says, or two of them, of keys and of values: "q8_0, f16". The shape is that of the
    artifact's config.json. None where there is none, where layers share a smaller cache, look only some way back or
    keep a state instead, and where a type is not known.
    """
    path = artifact / "config.json"
    config = shards.read_config(path) if path.is_file() else {}
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    keys, hidden = config.get("num_key_value_heads") or heads, config.get("hidden_size")
    if not all(type(each) is int and each > 0 for each in (layers, heads, keys, hidden)) or _looks_elsewhere(config):
        return None
    of_keys, _, of_values = (compute_type if kind == AUTO else kind).partition(", ")
    types = of_keys, of_values or of_keys
    if not VALUE_BYTES.keys() >= set(types):
        return None
    width = config.get("head_dim") or hidden // heads
    return round(layers * keys * width * sum(VALUE_BYTES[each] for each in types))


def _looks_elsewhere(config: dict) -> bool:
    """Whether some layer keeps something else than keys and values of all tokens, by transformers' names."""
    window = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    layers = set(map(str, config.get("layer_types") or ()))
    other = any(
        value and (key in OTHER_CACHES or any(part in key for part in OTHER_LAYERS)) for key, value in config.items()
    )
    return bool(window or other or layers - {"full_attention"})
