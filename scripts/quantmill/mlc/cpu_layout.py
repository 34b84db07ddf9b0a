"""The layout of a quantized matrix for the CPU's kernels: 16 interleaved rows are the lanes of a vector."""

import numpy as np

LANES = 16
ROWS = 2 * LANES  # rows are padded to a multiple of this


def padded_rows(rows: int) -> int:
    """Count the rows of a packed matrix."""
    return -(-rows // ROWS) * ROWS


def pack(matrix: np.ndarray) -> np.ndarray:
    """[rows, columns] -> [padded rows / 16, columns, 16], for words and for scales; added rows are zero."""
    filled = np.pad(matrix, ((0, padded_rows(len(matrix)) - len(matrix)), (0, 0)))
    return np.ascontiguousarray(filled.reshape(-1, LANES, matrix.shape[1]).transpose(0, 2, 1))
