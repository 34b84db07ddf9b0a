"""How the CPU's kernels want a quantized matrix: 16 rows interleaved, so that they are the lanes of a vector."""

import numpy as np

LANES = 16
ROWS = 2 * LANES  # rows are filled up to a multiple of this


def padded_rows(rows: int) -> int:
    """Rows of a packed matrix."""
    return -(-rows // ROWS) * ROWS


def pack(matrix: np.ndarray) -> np.ndarray:
    """[rows, columns] -> [padded rows / 16, columns, 16], for words and for scales; rows that are added are zero."""
    filled = np.pad(matrix, ((0, padded_rows(len(matrix)) - len(matrix)), (0, 0)))
    return np.ascontiguousarray(filled.reshape(-1, LANES, matrix.shape[1]).transpose(0, 2, 1))
