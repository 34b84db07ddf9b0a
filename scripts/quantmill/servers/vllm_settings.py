"""What vLLM is told unless a run says otherwise, offline and as a server: options in its words, and its environment."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quantmill.checkpoint import shards
from quantmill.common.model_config import of_text
from quantmill.devices import cpu
from quantmill.servers.vllm_options import value

OURS = frozenset(
    {"model", "tokenizer", "trust_remote_code", "served_model_name", "host", "port", "uds", "api_key"}
    | {"root_path", "ssl_keyfile", "ssl_certfile", "max_logprobs", "skip_tokenizer_init", "config"}
)
# of sockets, whose names have at most 107 bytes: a job's folder for temporary files may be longer
SOCKETS = {"VLLM_RPC_BASE_PATH": "/tmp"}
W4A8 = "VLLM_CPU_INT4_W4A8"  # 0 turns its rounding off
CPU_CACHE = "1"  # GiB of key-value cache on a CPU, where vLLM would take nearly all memory of the machine


def settings(artifact: Path, options: Mapping[str, Any], cards: int) -> dict[str, Any]:
    """The options that a run begins with: `options` over ours, on so many cards (0: a CPU).

    Nothing is read from a cache of prompts; the model's own generation_config.json (a repetition penalty) changes no
    tokens; a window of the whole context can be scored.
    """
    found: dict[str, Any] = {"enable_prefix_caching": False, "seed": 0, "generation_config": "vllm"}
    context = of_text(shards.read_json(artifact / "config.json")).get("max_position_embeddings")
    if isinstance(context, int):
        # a window of the whole context with its last target, which one token at least has to follow
        found["max_model_len"] = context + 2
    if cards > 1:
        others = value(options, "pipeline_parallel_size", 1) * value(options, "data_parallel_size", 1)
        found["tensor_parallel_size"] = max(1, cards // others)
    return found | dict(options)


def products(artifact: Path, device: str, dtype: str) -> dict[str, str]:
    """What a reader has to know of an artifact's products in this dtype, for a result's versions; else nothing.

    Where a CPU cannot multiply float16, vLLM was several times slower in it than in bfloat16 (results/smollm2-served).
    Where it has AMX, vLLM rounds to 8 bits what bfloat16 multiplies with weights of 4 bits
    (vllm/model_executor/kernels/linear/mixed_precision/cpu.py in 0.32): results/smollm2-libraries.
    """
    if device != "cpu":
        return {}
    if dtype == "float16" and not cpu.has_float16():
        return {"float16 products": "are not among this processor's own"}
    if dtype == "bfloat16" and cpu.has_amx() and os.environ.get(W4A8, "1") != "0" and has_four_bits(artifact):
        return {"int4 products": f"round what they multiply to 8 bits ({W4A8})"}
    return {}


def has_four_bits(artifact: Path) -> bool:
    """Whether the weights are integers of 4 bits, and what multiplies them is not rounded by the format itself."""
    words = shards.read_json(artifact / "config.json").get("quantization_config") or {}
    if groups := words.get("config_groups"):
        weights = [each.get("weights") or {} for each in groups.values() if not each.get("input_activations")]
        return any((each.get("num_bits"), each.get("type", "int")) == (4, "int") for each in weights)
    return words.get("quant_method") in ("gptq", "awq") and words.get("bits", words.get("w_bit")) == 4


def environment(cards: int, processors: Collection[int] = ()) -> dict[str, str]:
    """Nothing is reported to anybody; on a CPU it calculates on these processors, or on those that it finds."""
    found = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    if not cards:
        found["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE
        found |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors))} if processors else {}
    return found
