"""A GPU's attention of one position over a contiguous key-value cache [layers, kv_heads, C, head_dim], float16.

Decoding is bound by memory latency: the first keys are requested before the kernel waits for the one before it, and
positions are split over blocks (flash-decoding, Dao et al. 2023), of which the last to finish merges.
"""

from functools import cache
from pathlib import Path

from tvm.tirx import PrimFunc

from quantmill.mlc.cuda_kernel import include_guard, kernel

BLOCKS = 132  # that decode at a time: one on each multiprocessor of an H100 or H200
SOURCE = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")


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
