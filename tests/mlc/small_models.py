"""Small models with random weights in MLC's q4f16_1, written by hand from the format's description."""

import json
from pathlib import Path
from typing import Any

import numpy as np

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
LLAMA |= {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 224, "num_hidden_layers": 2, "head_dim": 32}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
LLAMA |= {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 10000.0}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 64}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama3": LLAMA
    | {"num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 128, "tie_word_embeddings": True}
    | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "mistral": LLAMA
    | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 320, "sliding_window": None},
    "qwen2": LLAMA | QWEN2 | {"rope_theta": 1000000.0},
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """MLC-LLM's parameters, the quantized ones by the shape that they stand for."""
    hidden, inner, size = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    fused = "c_attn" if config["model_type"] == "qwen2" else "qkv_proj"
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        rows = (heads + 2 * kv_heads) * size
        found[f"{layer}.self_attn.{fused}"] = (rows, hidden)
        if fused == "c_attn":
            found[f"{layer}.self_attn.c_attn.bias"] = (rows,)
        found[f"{layer}.self_attn.o_proj"] = (hidden, heads * size)
        found[f"{layer}.mlp.gate_up_proj"] = (2 * inner, hidden)
        found[f"{layer}.mlp.down_proj"] = (hidden, inner)
        found[f"{layer}.input_layernorm.weight"] = (hidden,)
        found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head"] = (config["vocab_size"], hidden)
    return found


def write(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Return an artifact without a library: configs in both spellings, one shard and its table of contents."""
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            tensors[name] = random.normal(1 if "norm" in name else 0, 0.2, shape).astype(np.float16)
            continue
        rows, columns = shape
        nibbles = random.integers(0, 15, (rows, columns // 8, 8), dtype=np.uint32)
        tensors[f"{name}.q_weight"] = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
        scales = random.uniform(0.01, 0.05, (rows, columns // 32))
        tensors[f"{name}.q_scale"] = scales.astype(np.float16)
    folder.mkdir()
    records, data = [], b""
    for name, array in tensors.items():
        facts = {"name": name, "shape": list(array.shape), "dtype": str(array.dtype), "format": "f32-to-bf16"}
        records.append(facts | {"nbytes": array.nbytes, "byteOffset": len(data)})
        data += array.tobytes()
    (folder / "params_shard_0.bin").write_bytes(data)
    shard = {"dataPath": "params_shard_0.bin", "format": "raw-shard", "nbytes": len(data), "records": records}
    (folder / "tensor-cache.json").write_text(json.dumps({"metadata": {}, "records": [shard]}))
    (folder / "config.json").write_text(json.dumps(config))
    own = {"context_window_size": config["max_position_embeddings"], "eos_token_id": config["eos_token_id"]}
    model = config | {"position_embedding_base": config["rope_theta"]}
    content = {"model_type": config["model_type"], "model_config": model}
    (folder / "mlc-chat-config.json").write_text(json.dumps(content | own))
    return folder
