"""Run in envs/torch: what plain transformers calculates with an artifact's weights, dequantized here by hand.

    python transformers_checks.py ARTIFACT CONFIG FACTS.npz

FACTS holds `ids`, `logits` and greedy `tokens` after the first PROMPT ids, as an engine gave them; printed is how far
they are from transformers', which calculates in float64: its kernels for float32 differ from processor to processor.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

artifact, config_path, facts_path = map(Path, sys.argv[1:])
config = AutoConfig.from_pretrained(config_path)
stored = {}
for shard in json.loads((artifact / "tensor-cache.json").read_text())["records"]:
    data = (artifact / shard["dataPath"]).read_bytes()
    for record in shard["records"]:
        flat = np.frombuffer(data, record["dtype"], offset=record["byteOffset"], count=np.prod(record["shape"]))
        stored[record["name"]] = flat.reshape(record["shape"])


def weight(name: str) -> np.ndarray:
    """(nibble - 7) * scale, eight nibbles a word from the lowest bits on, a scale for 32."""
    if f"{name}.q_weight" not in stored:
        return stored[f"{name}.weight"].astype(np.float32)
    words, scales = stored[f"{name}.q_weight"], stored[f"{name}.q_scale"]
    nibbles = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    return (nibbles.reshape(len(words), -1).astype(np.float32) - 7) * scales.astype(np.float32).repeat(32, 1)


size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
cuts = {"q": slice(0, queries), "k": slice(queries, queries + keys), "v": slice(queries + keys, None)}
halves = {"gate": slice(0, config.intermediate_size), "up": slice(config.intermediate_size, None)}
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
state = {}
for key in model.state_dict():
    module, kind = key.rsplit(".", 1)
    parent, _, name = module.rpartition(".")
    letter = name.removesuffix("_proj")
    if letter in cuts:
        fused = f"{parent}.c_attn" if config.model_type == "qwen2" else f"{parent}.qkv_proj"
        state[key] = (weight(fused) if kind == "weight" else stored[f"{fused}.bias"].astype(np.float32))[cuts[letter]]
    elif letter in halves:
        state[key] = weight(f"{parent}.gate_up_proj")[halves[letter]]
    elif name == "lm_head" and config.tie_word_embeddings:
        state[key] = weight("model.embed_tokens")
    else:
        state[key] = weight(module)
model.load_state_dict({key: torch.tensor(value, dtype=torch.float64) for key, value in state.items()})

facts = np.load(facts_path)
ids, tokens, prompt = facts["ids"].tolist(), facts["tokens"].tolist(), int(facts["prompt"])
with torch.inference_mode():
    logits, again = (model(torch.tensor([ids])).logits[0].numpy() for _ in range(2))
    after = model(torch.tensor([ids[:prompt] + tokens])).logits[0].numpy()[prompt - 1 : -1]
stop = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
after[:, stop] = -np.inf
best, second = np.sort(after)[:, -1], np.sort(after)[:, -2]
wrong = after.argmax(1) != tokens
errors = np.abs(facts["logits"] - logits).max(1) / np.abs(logits).max()
result = {
    "error": float(errors.max()),
    "far_positions": np.flatnonzero(errors > 1e-5).tolist(),
    "reference_again": float(np.abs(again - logits).max() / np.abs(logits).max()),
    "positions": len(logits),
    "tokens": len(tokens),
    "chose_stop": sorted(set(tokens) & set(stop)),
    # of tokens that transformers would not have chosen, by how much of the logits' size it prefers another
    "wrong_margins": ((best - second)[wrong] / np.abs(logits).max()).tolist(),
}
print(json.dumps(result))
