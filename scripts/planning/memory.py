"""How much memory a job takes, from a model's config.json: what a cluster must give it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIBRARIES = {"gptqmodel": 1000}  # MiB: Python, torch, transformers and the tool, before they hold any model
OTHERS = 1300  # the same of the other tools
CUDA = 2000  # MiB of host memory: the driver's and torch's, where a GPU is used
MIB = 2**20


def parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters outside of the blocks (embeddings and head) and of one block, of a decoder of Llama's kind."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    keys = (config.get("num_key_value_heads") or heads) * head_dim
    inner = config.get("intermediate_size") or 4 * hidden
    block = hidden * (2 * heads * head_dim + 2 * keys) + 3 * hidden * inner
    return (1 if config.get("tie_word_embeddings") else 2) * config["vocab_size"] * hidden, block


def quantization_mb(folder: Path, tool: str, calibration: Mapping[str, int], device: str) -> int:
    """MiB that quantizing the model in `folder` takes at most.

    gptqmodel holds embeddings, head and one block at a time (in float32, twice: as read and as changed), autoawq and
    auto-gptq the whole model likewise (once in float16 on its way to a GPU) and a few copies of one block. All keep the
    samples' activations (three float32 a token and hidden unit) and the attention of one sample. Figures from what jobs
    took: docs/PERFORMANCE.md.
    Raises `FileNotFoundError` where the model is not there yet: Snakemake then asks again.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    outside, block = parameters(config)
    if tool == "gptqmodel":
        weights = 8 * (outside + block)
    else:
        whole = outside + config["num_hidden_layers"] * block
        weights = (2 if device == "cuda" else 8) * whole + 12 * block
    length = min(
        calibration["sequence_length"], config.get("max_position_embeddings") or calibration["sequence_length"]
    )
    activations = 12 * calibration["samples"] * length * config["hidden_size"]
    attention = 8 * length**2 * config["num_attention_heads"]
    return LIBRARIES.get(tool, OTHERS) + (0 if device == "cpu" else CUDA) + (weights + activations + attention) // MIB
