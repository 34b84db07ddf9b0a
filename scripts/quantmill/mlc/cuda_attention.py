"""A GPU's attention over a contiguous key-value cache [layers, kv_heads, C, head_dim], float16.

Decoding is bound by memory latency: the first keys are requested before the kernel waits for the one before it, and
positions are split over blocks (flash-decoding, Dao et al. 2023), of which the last to finish merges. Many
positions are attended to by tensor cores (FlashAttention-2, Dao 2023, arXiv 2307.08691).
"""

from functools import cache
from pathlib import Path

from tvm.tirx import PrimFunc

from quantmill.mlc.cuda_kernel import include_guard, kernel

BLOCKS = 132  # that decode at a time: one on each multiprocessor of an H100 or H200
ROWS, THREADS = 64, 128  # queries and threads of a block, where there are many positions
SOURCE = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
MANY = Path(__file__).with_name("cuda_attention_many.cuh").read_text(encoding="utf-8")


def splits(kv_heads: int) -> int:
    """Count the blocks that share a key-value head's positions."""
    return max(1, min(64, BLOCKS // kv_heads))


def cache_buffers(layers: int, kv_heads: int, size: int) -> dict[str, tuple[tuple[int | str, ...], str]]:
    """Shapes and dtypes of keys and values for C positions."""
    return dict.fromkeys(("keys", "values"), ((layers, kv_heads, "C", size), "float16"))


@cache
def attend_one(layers: int, heads: int, kv_heads: int, size: int) -> PrimFunc:
    """Rotate the one position's qkv, append its key and value, and attend to all.

    Arguments: qkv, frequency [size / 2], position [1], counter [kv_heads] (zeros, and left so), keys, values, the
    layer, room for the parts of the sum, out.
    """
    parts = splits(kv_heads)
    buffers = {
        "qkv": ((1, 1, (heads + 2 * kv_heads) * size), "float16"),
        "frequency": ((size // 2,), "float32"),
        "position": ((1,), "int32"),
        "counter": ((kv_heads,), "int32"),
        **cache_buffers(layers, kv_heads, size),
        "layer": None,
        "partial": ((heads, parts, size + 2), "float32"),
        "out": ((1, 1, heads * size), "float16"),
    }
    threads = 512 if heads <= 2 * kv_heads else 256  # those of many heads want more registers
    function = f"attend_one<{heads}, {kv_heads}, {size}, {parts}, {threads}>"
    source = include_guard("MLC_ATTENTION", SOURCE)
    return kernel(function, source, buffers, kv_heads * parts, threads, ["layer", "C"])


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
    function, source = f"append<{heads}, {kv_heads}, {size}>", include_guard("MLC_ATTENTION_MANY", MANY)
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
    function, source = f"attend_many<{heads}, {kv_heads}, {size}>", include_guard("MLC_ATTENTION_MANY", MANY)
    blocks = lambda sizes: (sizes["S"] + ROWS - 1) // ROWS * heads  # noqa: E731
    return kernel(function, source, buffers, blocks, THREADS, ["layer", "S", "C"])
