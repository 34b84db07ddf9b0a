"""Layers of models by their configs, held against what is known of published models."""

from typing import Any

import pytest

from quantmill.checkpoint import kv_layers
from quantmill.metrics.footprint import Cache, Layers

LLAMA_3_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
GEMMA_7B = {**LLAMA_2_7B, "num_hidden_layers": 28, "num_attention_heads": 16, "hidden_size": 3072, "head_dim": 256}
DEEPSEEK_V3 = {**LLAMA_2_7B, "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128}
DEEPSEEK_V3 |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
GPT_OSS_20B = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
GPT_OSS_20B |= {"num_hidden_layers": 24, "layer_types": ["sliding_attention", "full_attention"] * 12}


def of_token(config: dict[str, Any], *more: Any) -> int | None:
    layers = kv_layers.of_config(config, 2, *more)
    return layers and Cache(layers).bytes_per_token()


def test_bytes_of_a_token_are_those_of_llama_cpp() -> None:
    """Its log has 1,024 MiB for 8,192 tokens of Llama 3 8B, 2,048 for 4,096 of Llama 2 7B, 3,584 for 8,192 of Gemma."""
    assert of_token(LLAMA_3_8B) == 1024 * 2**20 // 8192
    assert of_token(LLAMA_2_7B) == 2048 * 2**20 // 4096
    assert of_token(GEMMA_7B) == 3584 * 2**20 // 8192


def test_bytes_of_a_token_are_those_of_deepseeks_authors() -> None:
    """Table 1 of arXiv 2505.09343: 70.272 KB of DeepSeek-V3, 327.680 of Qwen2.5-72B, 516.096 of Llama 3.1 405B."""
    assert of_token(DEEPSEEK_V3) == 70_272
    assert of_token(LLAMA_3_8B | {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}) == 327_680
    assert (
        of_token(LLAMA_3_8B | {"num_hidden_layers": 126, "num_attention_heads": 128, "hidden_size": 16384}) == 516_096
    )


def test_each_gpu_keeps_latents_whole() -> None:
    assert of_token(DEEPSEEK_V3, 8) == 8 * 70_272


def test_gpus_that_share_a_head_keep_it_each() -> None:
    assert of_token(LLAMA_3_8B, 8) == of_token(LLAMA_3_8B)
    assert of_token(LLAMA_3_8B, 16) == 2 * of_token(LLAMA_3_8B)


def test_layers_with_and_without_a_window() -> None:
    assert kv_layers.of_config(GPT_OSS_20B, 2) == [Layers(12, 2048, 128), Layers(12, 2048)]
    assert kv_layers.of_config(LLAMA_3_8B | {"sliding_window": 4096}, 2) == [Layers(32, 4096, 4096)]
    shared = GPT_OSS_20B | {"num_kv_shared_layers": 4}
    assert kv_layers.of_config(shared, 2) == [Layers(10, 2048, 128), Layers(10, 2048)]


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": ["linear_attention"]},
        {"layer_types": ["chunked_attention"]},
        {"kv_lora_rank": 256, "qk_rope_head_dim": 32},  # MiniCPM3, which vLLM does not treat as DeepSeek
        {"v_head_dim": 64},
        {"multi_query": True},  # Falcon 7B
        {"num_kv_heads": 8},  # Falcon 40B
        {"attn_layer_period": 8},  # Jamba
        {"attn_layer_indices": [9, 18, 27]},  # Bamba
        {"block_types": ["recurrent", "recurrent", "attention"]},  # RecurrentGemma
        {"layers_block_type": ["mamba", "attention"]},
        {"attention_window_size": 2048},
        {"attention_chunk_size": 8192},  # Llama 4
        {"mamba_d_state": 16},
        {"hybrid_override_pattern": "M-M*"},  # Nemotron-H
        {"index_topk": 2048},  # DeepSeek-V3.2
        {"global_head_dim": 512},  # Gemma 4
        {"num_hidden_layers": 0},
        {"num_attention_heads": None, "num_key_value_heads": None},
    ],
)
def test_other_layers_are_unknown(more: dict[str, Any]) -> None:
    assert kv_layers.of_config(LLAMA_3_8B | more, 2) is None
    assert kv_layers.of_config(LLAMA_3_8B | {"multi_query": False, "attention_chunk_size": None}, 2) is not None
