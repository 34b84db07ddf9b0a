"""MLC-LLM's weight files a second time, straight from the format's description and as plainly as can be.

Nothing of scripts/quantmill/mlc is used: whole tensors in memory, float16 arithmetic by numpy, one step at a time.
"""

import hashlib
import json

import numpy as np

Tensors = dict[str, np.ndarray]
NOT_QUANTIZED = {"q4f16_1": (), "q4f16_2": ("model.embed_tokens", "lm_head"), "q0f16": ("",)}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a transformers checkpoint of Llama, Mistral or Qwen2."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    rows = {"q": heads * size, "k": config["num_key_value_heads"] * size, "v": config["num_key_value_heads"] * size}
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in (f"model.layers.{number}." for number in range(config["num_hidden_layers"])):
        for letter, count in rows.items():
            found[f"{layer}self_attn.{letter}_proj.weight"] = (count, hidden)
            if config["model_type"] == "qwen2":
                found[f"{layer}self_attn.{letter}_proj.bias"] = (count,)
        found[f"{layer}self_attn.o_proj.weight"] = (hidden, heads * size)
        found[f"{layer}mlp.gate_proj.weight"] = found[f"{layer}mlp.up_proj.weight"] = (inner, hidden)
        found[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        found[f"{layer}input_layernorm.weight"] = found[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    return found


def quantize(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float16 [N, K] -> uint32 [N, 4G], float16 [N, G]."""
    rows, inputs = weights.shape
    groups = (inputs + 31) // 32
    padded = np.zeros((rows, groups * 32), np.float16)
    padded[:, :inputs] = weights
    padded = padded.reshape(rows, groups, 32)
    with np.errstate(all="ignore"):
        scale = (np.abs(padded).max(2) / np.float16(7)).astype(np.float16)
        scaled = (padded / scale[..., None]).astype(np.float16)
        scaled = (scaled + np.float16(7)).astype(np.float16)
    rounded = np.nan_to_num(np.rint(scaled).astype(np.float32), nan=0, posinf=14, neginf=0)
    levels = np.clip(rounded, 0, 14).astype(np.uint32).reshape(rows, groups * 32)
    levels[:, inputs:] = 0
    words = np.zeros((rows, groups * 4), np.uint32)
    for i in range(8):
        words |= levels[:, i::8] << np.uint32(4 * i)
    return words, scale


def fuse(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the parameter that a tensor is a part of, and all its parts."""
    for fused, letters in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for letter in letters:
            if f".{letter}." in name:
                return name.replace(letter, fused), tuple(name.replace(letter, each) for each in letters)
    return name, (name,)


def write(
    tensors: Tensors, config: dict, quantization: str, files: list[list[str]], shard_bytes: int = 2**25
) -> dict[str, bytes]:
    """Return the files that MLC-LLM writes: name -> bytes.

    Args:
        tensors: of any float dtype; files: the names that each file of the checkpoint holds, in the index's order.
    """
    stored: Tensors = {}
    counted, loaded = 0, set()
    for name in [name for names in files for name in names]:
        fused, parts = fuse(name)
        if config["model_type"] == "qwen2":
            fused = fused.replace("qkv_proj", "c_attn")
        if fused in stored or fused.replace(".weight", ".q_weight") in stored:
            continue
        needed = {number for number, names in enumerate(files) if set(names) & set(parts)}
        if needed - loaded:  # the loader forgets a file that this parameter does not need when it reads another
            counted += sum(tensors[each].size for number in needed - loaded for each in files[number])
            loaded = needed
        weights = np.concatenate([tensors[part] for part in parts]).astype(np.float16)
        if weights.ndim == 2 and not name.startswith(NOT_QUANTIZED[quantization]):
            words, scale = quantize(weights)
            stored |= {fused.replace(".weight", ".q_weight"): words, fused.replace(".weight", ".q_scale"): scale}
        else:
            stored[fused] = weights
    return shards(stored, counted, shard_bytes)


def shards(stored: Tensors, counted: int, shard_bytes: int) -> dict[str, bytes]:
    """Cut tensors into shards, in their order."""
    files: dict[str, bytes] = {}
    records = []

    def flush(entries: list[dict], data: bytes) -> None:
        name = f"params_shard_{len(files)}.bin"
        files[name] = data
        md5 = hashlib.md5(data).hexdigest()
        records.append(
            {"dataPath": name, "format": "raw-shard", "nbytes": len(data), "records": entries, "md5sum": md5}
        )

    pending, data, total = [], b"", 0
    for name, value in stored.items():
        raw = value.tobytes()
        total += len(raw)
        entry = {
            "name": name,
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "format": "f32-to-bf16",
            "nbytes": len(raw),
        }
        if len(data) + len(raw) >= shard_bytes:
            if len(raw) * 2 >= shard_bytes:
                flush([entry | {"byteOffset": 0}], raw)
                continue
            flush(pending, data)
            pending, data = [], b""
        pending.append(entry | {"byteOffset": len(data)})
        data += raw
    if data:
        flush(pending, data)
    metadata = {"ParamSize": len(stored), "ParamBytes": float(total), "BitsPerParam": float(total) * 8.0 / counted}
    files["tensor-cache.json"] = json.dumps({"metadata": metadata, "records": records}, indent=4).encode()
    return files
