"""Bytes of a token's keys and values, held against what is known of published models."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantmill.loads import kv_cache

LLAMA_3_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
GEMMA_7B = {**LLAMA_2_7B, "num_hidden_layers": 28, "num_attention_heads": 16, "hidden_size": 3072, "head_dim": 256}


def of(folder: Path, config: dict[str, Any], *said: str) -> int | None:
    (folder / "config.json").write_text(json.dumps(config))
    return kv_cache.bytes_per_token(folder, "float16", *said)


def test_cache_bytes_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Its log has 1,024 MiB for 8,192 tokens of Llama 3 8B, 2,048 for 4,096 of Llama 2 7B, 3,584 for 8,192 of Gemma."""
    assert kv_cache.bytes_per_token(tmp_path, "float16") is None  # no config.json
    assert of(tmp_path, LLAMA_3_8B) == 1024 * 2**20 // 8192
    assert of(tmp_path, LLAMA_2_7B) == 2048 * 2**20 // 4096
    assert of(tmp_path, GEMMA_7B) == 3584 * 2**20 // 8192


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("auto", 1),
        ("bfloat16", 1),
        ("fp8_e4m3", 1 / 2),
        ("float32", 2),
        ("f16", 1),
        ("q8_0", 17 / 32),
        ("q8_0, f16", 49 / 64),
        ("f16, q4_0", 41 / 64),
    ],
)
def test_keys_and_values_may_differ_in_type(tmp_path: Path, said: str, share: float) -> None:
    assert of(tmp_path, LLAMA_3_8B, said) == share * 131072


def test_the_compute_type_is_the_caches_default(tmp_path: Path) -> None:
    of(tmp_path, LLAMA_3_8B)
    assert kv_cache.bytes_per_token(tmp_path, "float32") == 2 * 131072


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["linear_attention"]},
        {"sliding_window": 4096},
        {"kv_lora_rank": 512},
        {"multi_query": True},  # Falcon 7B
        {"num_kv_heads": 8},  # Falcon 40B
        {"attn_layer_period": 8},  # Jamba
        {"attn_layer_indices": [9, 18, 27]},  # Bamba
        {"block_types": ["recurrent", "recurrent", "attention"]},  # RecurrentGemma
        {"layers_block_type": ["mamba", "attention"]},
        {"attention_window_size": 2048},
        {"attention_chunk_size": 8192},  # Llama 4
        {"num_kv_shared_layers": 15},  # Gemma 3n
        {"mamba_d_state": 16},
        {"hybrid_override_pattern": "M-M*"},  # Nemotron-H
        {"num_hidden_layers": 0},
        {"hidden_size": "4096"},
    ],
)
def test_it_is_unknown_of_other_layers(tmp_path: Path, more: dict[str, Any]) -> None:
    assert of(tmp_path, LLAMA_3_8B | more) is None
    assert of(tmp_path, LLAMA_3_8B, "a type of next year") is None
    assert of(tmp_path, LLAMA_3_8B | {"sliding_window": 4096, "use_sliding_window": False}) == 131072
    assert of(tmp_path, LLAMA_3_8B | {"multi_query": False, "attention_chunk_size": None}) == 131072
    assert of(tmp_path, LLAMA_3_8B | {"sliding_window": None, "layer_types": ["full_attention"] * 32}) == 131072
