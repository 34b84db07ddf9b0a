"""CTranslate2's int8: a row of a matrix is round(w * scale), with scale 127 / max|w|; all else as in the source.

The converter renames variables and joins matrices (queries, keys and values), by other rules for every architecture.
But a row is always a row of the source, so the source's rows are looked up by their quantized values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import ctranslate2_bin
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError
from quantmill.layouts import Reading, array, step_round

MODEL = "model.bin"
SEED = 0x9E3779B97F4A7C15
BLOCK = 2**22  # elements at a time


def quantize(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize float32 [rows, inputs] to int8 of the same shape with float32 [rows] scales, as ctranslate2's
    model_spec.py."""
    peaks = np.abs(rows).max(axis=1)
    peaks[peaks == 0] = 127
    peaks = np.maximum(peaks, np.float32(127) / np.finfo(np.float32).max)
    scales = 127 / peaks
    return np.rint(rows * scales[:, None]).astype(np.int8), scales


def rounding(artifact: Path) -> Callable[[str, Any], Any]:
    """See `layouts`. Each row is rounded in 127 steps to either side."""
    return lambda layer, x: step_round(x, 127)


def row_hashes(rows: np.ndarray) -> np.ndarray:
    """Return a 64-bit number for each row of int8 [rows, inputs]; rows of other lengths have other numbers."""
    factors = np.random.default_rng([SEED, rows.shape[1]]).integers(0, 2**63, rows.shape[1], np.uint64) | np.uint64(1)
    step = max(1, BLOCK // rows.shape[1])
    blocks = (rows[low : low + step].astype(np.uint64) for low in range(0, len(rows), step))
    return np.concatenate([(block * factors).sum(axis=1, dtype=np.uint64) for block in blocks])


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `UserError` for a matrix of which only some rows are those of the source."""
    variables = ctranslate2_bin.read(artifact / MODEL).variables
    matrices = (each for each in variables.values() if each.dtype == "int8" and len(each.shape) == 2)
    stored = [np.memmap(artifact / MODEL, np.int8, "r", each.start, each.shape) for each in matrices]
    hashes = np.unique(np.concatenate([row_hashes(matrix) for matrix in stored]))

    def weights(tensor: Tensor) -> np.ndarray:
        values = array(tensor).astype(np.float32)
        if values.ndim != 2:
            return values
        for rows in (values, values.T):  # GPT-2's matrices are transposed
            numbers, scales = quantize(rows)
            found = np.isin(row_hashes(numbers), hashes)
            if found.all():
                quantized = numbers / scales[:, None]
                return quantized if rows is values else quantized.T
            if found.mean() > 0.5:
                wrong = int(np.flatnonzero(~found)[0])
                raise UserError(f"{artifact}: {tensor.name} is another matrix than the source's from row {wrong} on")
        return values  # stored unquantized or in another way; the gate compares logits

    return weights
