"""A GPU's attention of many positions, by tensor cores (FlashAttention-2, Dao 2023, arXiv 2307.08691)."""

from functools import cache
from pathlib import Path

from tvm.tirx import PrimFunc

from quantmill.mlc.cuda_attention import cache_buffers
from quantmill.mlc.cuda_kernel import include_guard, kernel

THREADS = 128
ROWS = 64  # queries of a block
SOURCE = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")


@cache
def append(layers: int, heads: int, kv_heads: int, size: int) -> PrimFunc:
    """Rotate qkv [1, S, …], and append keys and values.

    Arguments: qkv, frequency, position, keys, values, layer, queries.
    """
    buffers = {
        "qkv": ((1, "S", (heads + 2 * kv_heads) * size), "float16"),
        "frequency": ((size // 2,), "float32"),
        "position": ((1,), "int32"),
        **cache_buffers(layers, kv_heads, size),
        "layer": None,
        "queries": ((1, "S", heads * size), "float16"),
    }
    function, source = f"append<{heads}, {kv_heads}, {size}>", include_guard("MLC_ATTENTION_MANY", SOURCE)
    return kernel(function, source, buffers, lambda sizes: sizes["S"], 256, ["layer", "S", "C"])


@cache
def attend_many(layers: int, heads: int, kv_heads: int, size: int) -> PrimFunc:
    """Attend with rotated queries [1, S, heads * size] to the cache.

    Arguments: queries, position, keys, values, layer, out, arranged for a product.
    """
    buffers = {
        "queries": ((1, "S", heads * size), "float16"),
        "position": ((1,), "int32"),
        **cache_buffers(layers, kv_heads, size),
        "layer": None,
        "out": ((1, "S", heads * size), "float16"),
    }
    function, source = f"attend_many<{heads}, {kv_heads}, {size}>", include_guard("MLC_ATTENTION_MANY", SOURCE)
    blocks = lambda sizes: (sizes["S"] + ROWS - 1) // ROWS * heads  # noqa: E731
    return kernel(function, source, buffers, blocks, THREADS, ["layer", "S", "C"])
