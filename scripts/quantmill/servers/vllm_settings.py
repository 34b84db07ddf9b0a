"""Default options and environment of vLLM, offline and as a server; a run's options override them."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quantmill.checkpoint import kv_layers, shards
from quantmill.common.model_config import of_text
from quantmill.devices import cpu
from quantmill.metrics.footprint import VALUE_BYTES, Cache, Footprint
from quantmill.servers.vllm_options import value

OURS = frozenset(
    {"model", "tokenizer", "trust_remote_code", "served_model_name", "host", "port", "uds", "api_key"}
    | {"root_path", "ssl_keyfile", "ssl_certfile", "max_logprobs", "skip_tokenizer_init", "config"}
)
# a socket's path has at most 107 bytes, and a job's TMPDIR may be longer
SOCKETS = {"VLLM_RPC_BASE_PATH": "/tmp"}
W4A8 = "VLLM_CPU_INT4_W4A8"  # 0 turns its rounding off
CPU_CACHE = "1"  # GiB of KV cache on a CPU, where vLLM would take nearly all memory of the machine


def settings(artifact: Path, options: Mapping[str, Any], cards: int) -> dict[str, Any]:
    """Return a run's options, `options` over ours, for a number of GPUs (0: a CPU).

    Ours: no prefix cache; no effect of generation_config.json (such as a repetition penalty) on tokens; room to score a
    window of the whole context.
    """
    found: dict[str, Any] = {"enable_prefix_caching": False, "seed": 0, "generation_config": "vllm"}
    context = of_text(shards.read_json(artifact / "config.json")).get("max_position_embeddings")
    if isinstance(context, int):
        # a window of the whole context, its last target, and at least one generated token
        found["max_model_len"] = context + 2
    if cards > 1:
        others = value(options, "pipeline_parallel_size", 1) * value(options, "data_parallel_size", 1)
        found["tensor_parallel_size"] = max(1, cards // others)
    return found | dict(options)


def products(artifact: Path, device: str, dtype: str) -> dict[str, str]:
    """Return notes on an artifact's matrix products in this dtype, for the versions of a result.

    On a CPU without float16 products, vLLM was several times slower in float16 than in bfloat16
    (results/smollm2-served). With AMX, vLLM rounds the bfloat16 activations of 4-bit weights to 8 bits
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
    """Return whether the weights are 4-bit integers, in a format that does not quantize activations."""
    words = shards.read_json(artifact / "config.json").get("quantization_config") or {}
    if groups := words.get("config_groups"):
        weights = [each.get("weights") or {} for each in groups.values() if not each.get("input_activations")]
        return any((each.get("num_bits"), each.get("type", "int")) == (4, "int") for each in weights)
    return words.get("quant_method") in ("gptq", "awq") and words.get("bits", words.get("w_bit")) == 4


def environment(cards: int, processors: Collection[int] = ()) -> dict[str, str]:
    """Return vLLM's environment: no usage reports; on a CPU, these processors, or all if none are given."""
    found = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    if not cards:
        found["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE
        found |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors))} if processors else {}
    return found


def footprint(
    artifact: Path, config: Mapping[str, Any], dtype: str, kind: str, block: int, in_flight: int | None, cards: int
) -> Footprint | None:
    """Return what vLLM keeps; None of an unknown dtype.

    Args:
        config: the language model's keys as transformers completes them.
        kind: vLLM's name of the cache's type. block: tokens of a block.
        in_flight: tokens that are read before those outside a window are freed, at most; None: none are freed
            (SlidingWindowSpec of vllm/v1/kv_cache_interface.py, 0.32).
        cards: GPUs that divide the heads.
    """
    if dtype not in VALUE_BYTES:
        return None
    kind = dtype if kind == "auto" else kind
    layers = kv_layers.of_config(config, VALUE_BYTES[kind], cards) if kind in VALUE_BYTES else None
    beyond = None if in_flight is None else in_flight - 1
    cache = layers and Cache(layers, page=block, beyond=beyond, spare=1, grouped=beyond is not None)
    return Footprint(shards.bytes_held(artifact, VALUE_BYTES[dtype]), cache or None)
