"""Weights of any type as float16, bytes known by hand."""

import struct
from pathlib import Path

import numpy as np
import pytest
from raw_tensor import write_tensor

from quantmill.checkpoint.float16 import as_float, stored_dtype, write_float16
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError


def as_float16(tensor: Tensor) -> bytes:
    target = tensor.path.with_suffix(".f16")
    with target.open("wb", buffering=0) as file:
        write_float16(tensor, file)
    return target.read_bytes()


def test_bfloat16_bytes_by_hand(tmp_path: Path) -> None:
    # 0x3F80 is 1.0 and 0xC040 is -3.0 in bfloat16: the upper halves of the float32 patterns
    assert as_float(struct.pack("<HH", 0x3F80, 0xC040), "BF16").tolist() == [1.0, -3.0]
    tensor = write_tensor(tmp_path / "w", struct.pack("<HH", 0x3F80, 0xC040), "BF16", 2)
    assert as_float16(tensor) == np.array([1, -3], "<f2").tobytes()


def test_weights_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="w holds weights beyond 65,504"):
        as_float16(write_tensor(tmp_path / "w", np.array([1, 1e6], "<f4").tobytes(), "F32", 2))
    infinite = np.array([np.inf, 65504], "<f4")
    assert as_float16(write_tensor(tmp_path / "w", infinite.tobytes(), "F32", 2)) == infinite.astype("<f2").tobytes()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_float8_cannot_be_an_original_weight(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(UserError, match="w is float8, quantized already; name a model with the original weights"):
        stored_dtype(write_tensor(tmp_path / "w", bytes(2), dtype, 2))
    assert stored_dtype(write_tensor(tmp_path / "w", bytes(2), "U8", 2)) == "U8"
    assert stored_dtype(write_tensor(tmp_path / "w", bytes(8), "F64", 1)) == "F16"
