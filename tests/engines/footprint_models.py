"""Small random models whose layers keep different things of a token."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

REPO = Path(__file__).resolve().parents[2]
IDS = {"vocab_size": 2048, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}  # the demo's tokenizer
SHAPE = IDS | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": 32768}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = SHAPE | EXPERTS | {"num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 64}
LATENT |= {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
LINEAR |= {"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}
SHARED = {
    "num_hidden_layers": 10,
    "num_kv_shared_layers": 4,
    "layer_types": ([*["sliding_attention"] * 4, "full_attention"]) * 2,
}
SHARED |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 2048, "laurel_rank": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> transformers' config class and what it is given
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": 64}),
    "qwen2": (
        "Qwen2Config",
        GROUPED | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
    ),
    "gemma2": ("Gemma2Config", GROUPED | {"sliding_window": 64}),
    "gemma3": ("Gemma3TextConfig", GROUPED | {"num_hidden_layers": 7, "sliding_window": 64}),
    "gemma3n": ("Gemma3nTextConfig", GROUPED | SHARED | {"sliding_window": 64, "activation_sparsity_pattern": None}),
    "gpt_oss": ("GptOssConfig", GROUPED | {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2Config", LATENT | {"topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "qwen3_next": ("Qwen3NextConfig", GROUPED | EXPERTS | LINEAR | {"num_experts": 4}),
    "falcon": ("FalconConfig", IDS | {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}),
    "one group": (
        "LlamaConfig",
        SHAPE | {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 1},
    ),
}


def write(name: str, folder: Path) -> Path:
    """Write a model in float16, with the demo's tokenizer."""
    kind, words = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**words), dtype=torch.float16)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPO / "demo" / file, folder)
    return folder
