"""A tensor whose bytes a test writes by hand."""

from pathlib import Path

from quantmill.checkpoint.tensor import Tensor, row_major


def write_tensor(path: Path, data: bytes, dtype: str, numel: int) -> Tensor:
    """Write a file that is one tensor of one dimension, named w."""
    path.write_bytes(data)
    return Tensor("w", dtype, (numel,), row_major((numel,)), path, 0)
