"""Small random models of the architectures that CTranslate2's converter knows; needs torch and transformers.

Tokenizers are the demo's, without its unknown token, and with one token more than the models' vocabularies hold.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

REPO = Path(__file__).parents[2]
VOCAB = 2000  # the demo's tokenizer has 2,048
IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
SHAPE = IDS | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": 256}
GROUPED = SHAPE | {"num_key_value_heads": 2}
OLDER = IDS | {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """rope_parameters as transformers 5 writes them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0} | parameters}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LONG = {"short_factor": [1.1] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
ROPES = {
    "": {},
    " theta": rope("default", rope_theta=500.0),
    " llama3": LLAMA3,
    " linear": rope("linear", factor=2.0),
    " dynamic": rope("dynamic", factor=2.0),
    " yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
}
VARIANTS = ROPES | {
    " head_dim": {"head_dim": 32},
    " tied": {"tie_word_embeddings": True},
    " attention_bias": {"attention_bias": True},
    " mlp_bias": {"mlp_bias": True},
    " window": {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    " epsilon": {"rms_norm_eps": 0.1},
    " gelu": {"hidden_act": "gelu"},
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, GROUPED),
    "mistral": (transformers.MistralConfig, GROUPED | {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, GROUPED),
    "qwen3": (transformers.Qwen3Config, GROUPED | {"head_dim": 16}),
}
GEMMA = GROUPED | {"head_dim": 16}
LONGER = {"original_max_position_embeddings": 64}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
CAPLESS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
MODELS = {
    f"{family}{variant}": (config, shape | changes)
    for family, (config, shape) in FAMILIES.items()
    for variant, changes in VARIANTS.items()
} | {
    "gemma": (transformers.GemmaConfig, GEMMA),
    "gemma theta": (transformers.GemmaConfig, GEMMA | ROPES[" theta"]),
    "gemma2": (transformers.Gemma2Config, GEMMA | {"sliding_window": 4096}),
    "gemma2 without caps": (transformers.Gemma2Config, GEMMA | CAPLESS | {"sliding_window": 4096}),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA | LAYERS | {"sliding_window": 4096}),
    "gemma3 window": (transformers.Gemma3TextConfig, GEMMA | LAYERS | {"sliding_window": 32}),
    "phi3": (transformers.Phi3Config, GROUPED),
    "phi3 theta": (transformers.Phi3Config, GROUPED | ROPES[" theta"]),
    "phi3 longrope": (transformers.Phi3Config, GROUPED | LONGER | rope("longrope", **LONG)),
    "phi3 partial": (transformers.Phi3Config, GROUPED | rope("default", partial_rotary_factor=0.5)),
    "phi3 epsilon": (transformers.Phi3Config, GROUPED | {"rms_norm_eps": 0.1}),
    "phi3 window": (transformers.Phi3Config, GROUPED | {"sliding_window": 32}),
    "gpt2": (transformers.GPT2Config, OLDER),
    "gptj": (transformers.GPTJConfig, OLDER | {"rotary_dim": 8}),
    "gpt_bigcode": (transformers.GPTBigCodeConfig, OLDER),
    "gpt_neox": (transformers.GPTNeoXConfig, SHAPE),
    "falcon": (transformers.FalconConfig, SHAPE),
    "mixtral": (transformers.MixtralConfig, GROUPED),
}


def source(folder: Path, config: type, words: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model; biases and norms are random too, so that a dropped one is noticed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**words), dtype=torch.float32)
    with torch.no_grad():
        for key, value in model.named_parameters():
            scale = "norm" in key or "ln_" in key or "_ln" in key
            gemma = config.__name__.startswith("Gemma")
            value.copy_(torch.randn_like(value) * 0.15 + (scale and value.ndim == 1 and not gemma))
    model.to(dtype).save_pretrained(folder)
    for file in (REPO / "demo").glob("token*"):
        shutil.copy(file, folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer.pop("unk_token", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder
