"""Run in envs/llama_cpp: what test_mixture.py asserts of measurements, as JSON.

python tests/build/sensitivity_checks.py SAFETENSORS
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from quantmill.llamacpp.sensitivity import Model

folder = Path(sys.argv[1])
windows = np.random.default_rng(0).integers(2, 2000, size=(2, 64)).tolist()
names = ["model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight", "model.layers.6.self_attn.q_proj.weight"]
names.append("lm_head.weight")
model = Model(folder, "cpu", 1, windows)
assert model.resumable
other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def by_hand(name: str, weights: np.ndarray) -> float:
    """Return the same divergence by a whole model, in numpy."""
    matrix, ids = other.get_parameter(name), torch.tensor(windows)
    with torch.inference_mode():
        first = other(input_ids=ids, use_cache=False).logits.double().numpy()
        own, matrix.data = matrix.data, torch.from_numpy(weights)
        second = other(input_ids=ids, use_cache=False).logits.double().numpy()
        matrix.data = own
    first, second = (each - np.log(np.exp(each).sum(axis=-1, keepdims=True)) for each in (first, second))
    return float((np.exp(first) * (first - second)).sum(axis=-1).mean())


facts = {}
for name in names:
    noise = np.random.default_rng(1).standard_normal(model.weights(name).shape, np.float32)
    changed = model.weights(name) * (1 + 0.05 * noise)
    facts[name] = [model.first_layer(name), model.divergence(name, changed), by_hand(name, changed)]
    assert model.divergence(name, model.weights(name)) == 0  # everything is as it was
print(json.dumps(facts))
