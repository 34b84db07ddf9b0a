"""Weights as formats store them, packed here number by number, and read back."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from weight_files import save_file, source

from quantmill import layouts
from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.common.program import UserError
from quantmill.layouts import Unread, awq, ct2, gptq, hf
from quantmill.layouts.write_model import write_model

LAYER = "model.layers.0.mlp.up_proj"
INPUTS, OUTPUTS, GROUP = 16, 8, 8
random = np.random.default_rng(7)
NUMBERS = random.integers(0, 16, (INPUTS, OUTPUTS))
ZEROS = random.integers(1, 16, (INPUTS // GROUP, OUTPUTS))
SCALES = random.uniform(0.001, 0.1, (INPUTS // GROUP, OUTPUTS)).astype(np.float16)
GROUPS = np.arange(INPUTS) // GROUP


def weights() -> np.ndarray:
    """Return the layer's weights [outputs, inputs]."""
    return ((NUMBERS - ZEROS[GROUPS]) * SCALES.astype(np.float32)[GROUPS]).T


def word(values: list[int]) -> int:
    """Eight numbers of four bits, the first in the lowest."""
    packed = sum(int(value) << (4 * place) for place, value in enumerate(values))
    return packed - 2**32 if packed >= 2**31 else packed


def artifact(folder: Path, config: dict, **parts: np.ndarray) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    norm = {"model.norm.weight": np.arange(4, dtype=np.float16)}
    save_file({f"{LAYER}.{name}": value for name, value in parts.items()} | norm, folder / "model.safetensors")
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Checkpoint:
    matrix = np.zeros((OUTPUTS, INPUTS), np.float16)
    return source(tmp_path / "source", {f"{LAYER}.weight": matrix, "model.norm.weight": np.zeros(4, np.float16)})


def check(reading: layouts.Reading, plain: Checkpoint) -> None:
    tensors = plain.tensors()
    assert reading(tensors[f"{LAYER}.weight"]) == pytest.approx(weights(), abs=1e-7)
    assert reading(tensors["model.norm.weight"]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("variant", "less"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq(plain: Checkpoint, tmp_path: Path, variant: str, less: int) -> None:
    parts = {
        "qweight": [[word(NUMBERS[low : low + 8, out]) for out in range(OUTPUTS)] for low in range(0, INPUTS, 8)],
        "qzeros": [[word(row - less)] for row in ZEROS],
        "g_idx": GROUPS,
    }
    stored = {name: np.array(value, np.int32) for name, value in parts.items()} | {"scales": SCALES}
    folder = artifact(tmp_path / "gptq", {"bits": 4, "checkpoint_format": variant}, **stored)
    check(gptq.read(folder, plain), plain)


@pytest.mark.parametrize("size", [GROUP, -1])
def test_gptq_without_an_order_of_inputs(tmp_path: Path, plain: Checkpoint, size: int) -> None:
    groups = np.zeros(INPUTS, int) if size < 0 else GROUPS
    zeros, scales = (ZEROS, SCALES) if size > 0 else (ZEROS[:1], SCALES[:1])
    packed = [[word(NUMBERS[low : low + 8, out]) for out in range(OUTPUTS)] for low in range(0, INPUTS, 8)]
    stored = {"qweight": np.array(packed, np.int32), "qzeros": np.array([[word(row - 1)] for row in zeros], np.int32)}
    folder = artifact(tmp_path / "gptq", {"bits": 4, "group_size": size}, **stored, scales=scales)
    found = gptq.read(folder, plain)(plain.tensors()[f"{LAYER}.weight"])
    assert found == pytest.approx(((NUMBERS - zeros[groups]) * scales.astype(np.float32)[groups]).T, abs=1e-7)


def test_awq(plain: Checkpoint, tmp_path: Path) -> None:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    stored = {name: np.array([[word(row[order])] for row in rows], np.int32) for name, rows in
              (("qweight", NUMBERS), ("qzeros", ZEROS))}  # fmt: skip
    folder = artifact(tmp_path / "awq", {"bits": 4, "version": "gemm"}, **stored, scales=SCALES)
    check(awq.read(folder, plain), plain)


@pytest.mark.parametrize(
    ("module", "config"), [(gptq, {"bits": 8}), (awq, {"bits": 3}), (awq, {"bits": 4, "version": "gemv"})]
)
def test_another_packing_is_not_read(plain: Checkpoint, tmp_path: Path, module: object, config: dict) -> None:
    with pytest.raises(Unread):
        module.read(artifact(tmp_path / "other", config), plain)


def test_a_tensor_that_is_not_there_is_named(plain: Checkpoint, tmp_path: Path) -> None:
    reading = hf.read(artifact(tmp_path / "other", {}), plain)
    with pytest.raises(Unread, match=f"it holds no {LAYER}.weight"):
        reading(plain.tensors()[f"{LAYER}.weight"])


def model_bin(folder: Path, matrices: list[np.ndarray]) -> Path:
    """Write a CTranslate2 model of int8 matrices, in its binary version 6."""
    folder.mkdir()
    data = struct.pack("<IH", 6, 2) + b"x\0" + struct.pack("<II", 1, len(matrices))
    for number, matrix in enumerate(matrices):
        name = f"layer_{number}/weight\0".encode()
        data += struct.pack("<H", len(name)) + name + struct.pack("<BIIBI", 2, *matrix.shape, 1, matrix.nbytes)
        data += matrix.tobytes()
    (folder / "model.bin").write_bytes(data + bytes(4))  # and no aliases
    return folder


MATRIX = random.normal(0, 0.02, (6, INPUTS)).astype(np.float16)
STEPS = np.abs(MATRIX.astype(np.float32)).max(axis=1, keepdims=True) / 127
INT8 = np.rint(MATRIX.astype(np.float32) / STEPS).astype(np.int8)


@pytest.mark.parametrize("turned", [False, True])
def test_ctranslate2_finds_rows_wherever_they_lie(tmp_path: Path, turned: bool) -> None:
    """Joined with others, in another order, or the other way around as in GPT-2."""
    kept = source(tmp_path / "source", {"h.weight": np.ascontiguousarray(MATRIX.T if turned else MATRIX)})
    joined = np.concatenate([np.ones((2, INPUTS), np.int8), INT8[::-1]])
    reading = ct2.read(model_bin(tmp_path / "ct2", [np.ones((3, 5), np.int8), joined]), kept)
    found = reading(kept.tensors()["h.weight"])
    assert (found.T if turned else found) == pytest.approx(INT8 * STEPS, rel=1e-6)


def test_a_matrix_that_the_conversion_changed_is_named(tmp_path: Path) -> None:
    kept = source(tmp_path / "source", {"h.weight": MATRIX})
    changed = INT8.copy()
    changed[4, 3] ^= 1
    reading = ct2.read(model_bin(tmp_path / "ct2", [changed]), kept)
    with pytest.raises(UserError, match=r"h\.weight is another matrix than the source's from row 4 on"):
        reading(kept.tensors()["h.weight"])


def test_an_unquantized_matrix_is_the_sources(tmp_path: Path) -> None:
    kept = source(tmp_path / "source", {"h.weight": MATRIX})
    reading = ct2.read(model_bin(tmp_path / "ct2", [np.ones((3, INPUTS), np.int8)]), kept)
    assert np.array_equal(reading(kept.tensors()["h.weight"]), MATRIX)


def test_the_written_model_holds_the_read_weights(plain: Checkpoint, tmp_path: Path) -> None:
    write_model(tmp_path / "run", plain, lambda tensor: np.full(tensor.shape, 0.5), "F32")
    run = shards.find(tmp_path / "run")
    assert run.config() == {"vocab_size": 3}
    assert {tensor.dtype for tensor in run.tensors().values()} == {"F32"}
    assert all((layouts.array(tensor) == 0.5).all() for tensor in run.tensors().values())
