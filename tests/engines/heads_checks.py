"""Run in envs/torch: facts of heads that test_heads.py asserts, as JSON. The models are tiny and random."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantmill import engines

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
    "phi": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}
IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def facts(kind: str, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what an engine knows of its head, and how far that head's logits are from the model's own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes}, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.3 * torch.randn(weights.shape)  # or a cap would change nothing
    model.save_pretrained(folder)
    engine = engines.load("transformers", folder, "cpu", 1)
    head = engine.head(IDS)
    with torch.inference_mode():
        own = engine.model(torch.tensor([IDS])).logits[0]
    ours = torch.cat([torch.tensor(chunk) for chunk in engine.logits(IDS)])
    kept = None if head is None else {"scale": head.scale, "cap": head.cap, "bias": head.bias is not None}
    return {"head": kept, "off": float((own - ours).abs().max() / own.abs().max()), "largest": float(own.abs().max())}


with tempfile.TemporaryDirectory() as temporary:
    found = {kind: facts(kind, changes, Path(temporary, kind)) for kind, changes in MODELS.items()}
    # a cap that the config does not name: no product of a head
    path = Path(temporary, "gemma2", "config.json")
    engine = engines.load("transformers", path.parent, "cpu", 1)
    engine.model.config.final_logit_softcapping = 3.0
    engine.model.config.get_text_config = lambda: AutoConfig.for_model("llama")
    found["another"] = {"head": engine.head(IDS)}
print(json.dumps(found))
