"""A GPU's choice of a token."""

from functools import cache
from pathlib import Path

from tvm.tirx import PrimFunc

from quantmill.mlc.cuda_kernel import include_guard, kernel

THREADS = 1024
SOURCE = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")


@cache
def choose(vocabulary: int) -> PrimFunc:
    """Choose the first token of the largest logit + bias, and advance the position by the S that were read."""
    buffers = {
        "logits": ((1, 1, vocabulary), "float16"),
        "bias": ((vocabulary,), "float32"),
        "token": ((1, 1), "int32"),
        "position": ((1,), "int32"),
        "count": None,
    }
    return kernel(f"choose<{vocabulary}>", include_guard("MLC_CHOOSE", SOURCE), buffers, 1, THREADS, ["count"])
