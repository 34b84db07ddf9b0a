"""llama-quantize: what it would store, and how it is told each tensor's type."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import llamacpp
from checkpoint import gguf_file
from common.program import UserError

IMATRIX = "imatrix.gguf"
LINE = re.compile(r"^\[ *\d+/ *\d+\] (\S+) .* MiB -> .* MiB \((\w+)\)$", re.MULTILINE)
UP = 32  # bytes, to a multiple of which llama-quantize pads each tensor


def plan(base: Path, type_: str, imatrix: Path | None) -> dict[str, str]:
    """The tensors of a file that llama-quantize would quantize to a type of its own, and as what it would store each.

    base: an artifact that is not quantized. Nothing is written. Raises `UserError` where it would store none.
    """
    matrix = ["--imatrix", imatrix / IMATRIX] if imatrix else []
    said = llamacpp.call("llama-quantize", *matrix, "--dry-run", base, type_)
    found = {name: stored.upper() for name, stored in LINE.findall(said)}
    if not found:
        raise UserError(f"{base}: llama-quantize would store none of its tensors as {type_}")
    return found


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes in a file."""
    return -(-nbytes // UP) * UP


def type_lines(types: Mapping[str, str]) -> str:
    """What --tensor-type-file takes: a pattern of a whole name, and its type, in every line."""
    return "".join(f"^{re.escape(name)}$={type_.lower()}\n" for name, type_ in types.items())


def importance(imatrix: Path) -> dict[str, np.ndarray]:
    """Tensor -> mean square of each column's inputs, float32 [columns], as llama-quantize takes them from a matrix.

    Tensors of experts, which have several, are left out.
    """
    tensors = gguf_file.read(imatrix / IMATRIX).tensors
    found = {}
    for name, record in tensors.items():
        tensor = name.removesuffix(".in_sum2")
        if tensor != name and record.numel == record.shape[-1]:
            count = float(_floats(tensors[f"{tensor}.counts"])[0])
            sums = _floats(record)
            found[tensor] = sums / np.float32(count) if count > 0 else np.ones_like(sums)
    return found


def _floats(record: gguf_file.Tensor) -> np.ndarray:
    return np.fromfile(record.path, np.float32, record.numel, offset=record.offset)
