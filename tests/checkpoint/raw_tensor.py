"""A tensor whose bytes a test writes by hand."""

from pathlib import Path

from quantmill.checkpoint.tensor import Tensor, row_major


def write_tensor(path: Path, data: bytes, dtype: str, numel: int) -> Tensor:
    """A tensor of one dimension, named w, that is the whole file at `path`."""
    path.write_bytes(data)
    return Tensor("w", dtype, (numel,), row_major((numel,)), path, 0)
