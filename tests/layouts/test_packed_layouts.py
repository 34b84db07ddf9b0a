"""compressed-tensors, bitsandbytes, torchao and HQQ: weights packed here number by number, and read back."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_layouts import LAYER, artifact, plain
from weight_files import source

from quantmill import layouts
from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError
from quantmill.layouts import Layer, Unread, bitsandbytes, compressed_tensors, hqq, torchao

__all__ = ["plain"]  # a fixture
NAME = f"{LAYER}.weight"
OUTPUTS, INPUTS = 8, 16
random = np.random.default_rng(11)
BYTES = random.integers(-127, 128, (OUTPUTS, INPUTS)).astype(np.int8)
ROWS = random.uniform(0.001, 0.1, (OUTPUTS, 1)).astype(np.float32)
NIBBLES = random.integers(0, 16, (OUTPUTS, INPUTS))
# OCP 8-bit floating point specification, table 2: bytes of e4m3 and what they are
E4M3 = {0x00: 0, 0x01: 2**-9, 0x07: 0.875 * 2**-6, 0x08: 2**-6, 0x38: 1, 0x3C: 1.5, 0x7E: 448, 0xB8: -1, 0xFE: -448}
VALUE = np.vectorize(E4M3.get, otypes=[float])
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def check(reading: layouts.Reading, plain: Checkpoint, expected: np.ndarray) -> None:
    tensors = plain.tensors()
    assert reading(tensors[NAME]) == pytest.approx(expected, rel=1e-6)
    assert reading(tensors["model.norm.weight"]).tolist() == [0, 1, 2, 3]


def words(format: str, bits: int = 4, group: int | None = None, **more: object) -> dict[str, object]:
    """Return a quantization_config as llm-compressor writes it."""
    weights = {"num_bits": bits, "symmetric": True, "group_size": group, **more}
    return {"config_groups": {"group_0": {"format": format, "weights": weights}}, "quant_method": "compressed-tensors"}


def float8(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint8).view(bool)


def halves(numbers: np.ndarray) -> np.ndarray:
    """Two numbers of four bits a byte, the first in the lower half."""
    return (numbers[:, ::2] | numbers[:, 1::2] << 4).astype(np.uint8)


def test_float8(tmp_path: Path) -> None:
    checkpoint = source(tmp_path / "source", {"h.weight": float8(np.array([*E4M3]))})
    assert layouts.array(checkpoint.tensors()["h.weight"]).tolist() == [*E4M3.values()]
    assert np.isnan(layouts.E4M3[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(layouts.E4M3, [0x7F, 0xFF])).all()


def test_int4_in_groups(plain: Checkpoint, tmp_path: Path) -> None:
    packed = np.zeros((OUTPUTS, INPUTS // 8), np.uint32)
    for column in range(INPUTS):
        packed[:, column // 8] |= NIBBLES[:, column].astype(np.uint32) << 4 * (column % 8)
    scales = random.uniform(0.001, 0.1, (OUTPUTS, 2)).astype(np.float16)
    folder = artifact(
        tmp_path / "ct", words("pack-quantized", group=8), weight_packed=packed.view(np.int32), weight_scale=scales
    )
    expected = (NIBBLES - 8.0) * scales.astype(float)[:, np.arange(INPUTS) // 8]
    check(compressed_tensors.read(folder, plain), plain, expected)


def test_int8_and_float8_by_row(plain: Checkpoint, tmp_path: Path) -> None:
    by_row = {"bits": 8, "strategy": "channel"}
    folder = artifact(tmp_path / "int8", words("int-quantized", **by_row), weight=BYTES, weight_scale=ROWS)
    check(compressed_tensors.read(folder, plain), plain, BYTES * ROWS)
    keys = random.choice([*E4M3], (OUTPUTS, INPUTS))
    folder = artifact(tmp_path / "fp8", words("float-quantized", **by_row), weight=float8(keys), weight_scale=ROWS)
    check(compressed_tensors.read(folder, plain), plain, VALUE(keys) * ROWS)


def zero_points(groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return zero points of each row's groups, and as they are stored: those of eight rows a word."""
    found = random.integers(0, 16, (OUTPUTS, groups))
    word = sum(found[row].astype(np.uint32) << np.uint32(4 * row) for row in range(OUTPUTS))
    return found, word.view(np.int32)[None]


@pytest.mark.parametrize(("strategy", "groups"), [("group", 2), ("channel", 1)])
def test_int4_with_zero_points(plain: Checkpoint, tmp_path: Path, strategy: str, groups: int) -> None:
    zeros, stored = zero_points(groups)
    packed = sum(NIBBLES[:, place::8].astype(np.uint32) << np.uint32(4 * place) for place in range(8))
    scales = random.uniform(0.001, 0.1, (OUTPUTS, groups)).astype(np.float32)
    size = 8 if strategy == "group" else None
    config = words("pack-quantized", group=size, strategy=strategy, symmetric=False)
    parts = {"weight_packed": packed.view(np.int32), "weight_scale": scales, "weight_zero_point": stored}
    assert compressed_tensors.packed_shapes(config, (OUTPUTS, INPUTS)) == {
        name: value.shape for name, value in parts.items()
    }
    of_input = np.arange(INPUTS) * groups // INPUTS
    expected = (NIBBLES - zeros[:, of_input]) * scales[:, of_input].astype(float)
    check(compressed_tensors.read(artifact(tmp_path / "ct", config, **parts), plain), plain, expected)


@pytest.mark.parametrize(
    ("order", "fits"), [([1, 0] * 8, True), ([-1] * 16, True), ([0] * 16, False), ([2, 0] * 8, False)]
)
def test_an_order_of_inputs_fills_each_group(tmp_path: Path, order: list[int], fits: bool) -> None:
    parts = {"weight_g_idx": np.array(order, np.int32), "weight_scale": np.ones((OUTPUTS, 2), np.float32)}
    stored = shards.find(artifact(tmp_path / "ct", {}, **parts)).tensors()
    layer = Layer(Tensor(NAME, "F16", (OUTPUTS, INPUTS), (INPUTS, 1), tmp_path, 0), stored)
    if fits:
        compressed_tensors.check(layer)
        return
    with pytest.raises(UserError, match=r"weight_g_idx does not put as many inputs into each of 2 groups"):
        compressed_tensors.check(layer)


def test_int8_in_words(plain: Checkpoint, tmp_path: Path) -> None:
    numbers = (BYTES.astype(int) + 128).astype(np.uint8)
    config = words("pack-quantized", bits=8, strategy="channel")
    folder = artifact(tmp_path / "ct", config, weight_packed=numbers.view(np.int32), weight_scale=ROWS)
    check(compressed_tensors.read(folder, plain), plain, BYTES * ROWS)


@pytest.mark.parametrize(("strategy", "shape"), [("tensor", (1,)), ("block", (2, 4))])
def test_float8_by_tensor_and_block(plain: Checkpoint, tmp_path: Path, strategy: str, shape: tuple[int, ...]) -> None:
    keys, scales = random.choice([*E4M3], (OUTPUTS, INPUTS)), random.uniform(0.01, 1, shape).astype(np.float32)
    config = words("float-quantized", bits=8, strategy=strategy, block_structure=[4, 4])
    assert compressed_tensors.packed_shapes(config, (OUTPUTS, INPUTS))["weight_scale"] == shape
    folder = artifact(tmp_path / "fp8", config, weight=float8(keys), weight_scale=scales)
    each = np.kron(scales, np.ones((4, 4))) if strategy == "block" else scales
    check(compressed_tensors.read(folder, plain), plain, VALUE(keys) * each)


def test_nvfp4(plain: Checkpoint, tmp_path: Path) -> None:
    keys = random.choice([0x08, 0x38, 0x3C, 0x7E], (OUTPUTS, 2))
    whole = np.array([1234.5], np.float32)
    parts = {"weight_packed": halves(NIBBLES), "weight_scale": float8(keys), "weight_global_scale": whole}
    folder = artifact(tmp_path / "nvfp4", words("nvfp4-pack-quantized", group=8), **parts)
    scales = VALUE(keys)[:, np.arange(INPUTS) // 8]
    check(compressed_tensors.read(folder, plain), plain, np.take(FP4, NIBBLES) * scales / 1234.5)


def test_mxfp4(plain: Checkpoint, tmp_path: Path) -> None:
    exponents = random.integers(115, 130, (OUTPUTS, 2)).astype(np.uint8)
    parts = {"weight_packed": halves(NIBBLES), "weight_scale": exponents}
    folder = artifact(tmp_path / "mxfp4", words("mxfp4-pack-quantized", group=8), **parts)
    scales = 2.0 ** (exponents[:, np.arange(INPUTS) // 8].astype(int) - 127)
    check(compressed_tensors.read(folder, plain), plain, np.take(FP4, NIBBLES) * scales)


@pytest.mark.parametrize(
    "config",
    [
        {},
        words("marlin-24"),
        words("pack-quantized", bits=3),
        words("pack-quantized") | {"transform_config": {"rotations": 1}},
        {"config_groups": words("pack-quantized")["config_groups"] | {"other": {}}},
    ],
)
def test_another_compressed_tensors_is_not_read(plain: Checkpoint, tmp_path: Path, config: dict) -> None:
    with pytest.raises(Unread):
        compressed_tensors.read(artifact(tmp_path / "other", config), plain)


def state(**more: object) -> np.ndarray:
    content = {"blocksize": 32, "dtype": "float32", "shape": [OUTPUTS, INPUTS], **more}
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_in_four_bits(plain: Checkpoint, tmp_path: Path, nested: bool) -> None:
    flat = NIBBLES.reshape(-1)
    table, count = np.sort(random.normal(0, 1, 16)).astype(np.float32), flat.size // 32
    parts = {"weight": (flat[::2] << 4 | flat[1::2]).astype(np.uint8)[:, None], "weight.quant_map": table}
    if nested:
        numbers, outer = random.integers(0, 256, count).astype(np.uint8), np.array([0.5], np.float32)
        codes = np.linspace(-1, 1, 256, dtype=np.float32)
        parts |= {"weight.absmax": numbers, "weight.nested_absmax": outer, "weight.nested_quant_map": codes}
        parts |= {"weight.quant_state.bitsandbytes__nf4": state(nested_blocksize=32, nested_offset=0.75)}
        peaks = codes[numbers] * outer[0] + 0.75
    else:
        peaks = random.uniform(0, 1, count).astype(np.float32)
        parts |= {"weight.absmax": peaks, "weight.quant_state.bitsandbytes__nf4": state()}
    folder = artifact(tmp_path / "bnb", {}, **parts)
    expected = (table[flat] * peaks.repeat(32)).reshape(OUTPUTS, INPUTS)
    check(bitsandbytes.read(folder, plain), plain, expected)


@pytest.mark.parametrize(("dtype", "expected"), [("float16", 1.0), ("bfloat16", 1.0), ("float32", 1.0001)])
def test_bitsandbytes_rounds_to_the_dtype_that_it_names(
    plain: Checkpoint, tmp_path: Path, dtype: str, expected: float
) -> None:
    parts = {"weight": np.full((64, 1), 0xFF, np.uint8), "weight.quant_map": np.full(16, 1.0001, np.float32)}
    parts |= {"weight.absmax": np.ones(4, np.float32), "weight.quant_state.bitsandbytes__nf4": state(dtype=dtype)}
    folder = artifact(tmp_path / "bnb", {}, **parts)
    found = bitsandbytes.read(folder, plain)(plain.tensors()[NAME])
    assert found == pytest.approx(np.full((OUTPUTS, INPUTS), expected), rel=1e-7)


def test_bitsandbytes_without_a_state(plain: Checkpoint, tmp_path: Path) -> None:
    parts = {"weight": np.zeros((64, 1), np.uint8), "weight.absmax": np.ones(4, np.float32)}
    for number, more in enumerate(({}, {"weight.quant_state.bitsandbytes__nf4": np.zeros(9, np.uint8)})):
        folder = artifact(tmp_path / f"bnb{number}", {}, **parts, **more)
        with pytest.raises(Unread, match="quant_state"):
            bitsandbytes.read(folder, plain)(plain.tensors()[NAME])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (state(shape=7), "weight says that it is 7"),
        (state(shape="big"), "weight says that it is big"),
        (state(more=" " * 2**16), "is over 64 KiB"),
        (np.frombuffer(b"[" * 60_000, np.uint8), "that is JSON"),
    ],
)
def test_a_strangers_state_of_bitsandbytes_is_no_traceback(
    plain: Checkpoint, tmp_path: Path, said: np.ndarray, message: str
) -> None:
    parts = {"weight": np.zeros((64, 1), np.uint8), "weight.absmax": np.ones(4, np.float32)}
    folder = artifact(tmp_path / "bnb", {}, **parts, **{"weight.quant_state.bitsandbytes__nf4": said})
    with pytest.raises(Unread, match=message):
        bitsandbytes.read(folder, plain)(plain.tensors()[NAME])


def test_int8_of_bitsandbytes_and_torchao(plain: Checkpoint, tmp_path: Path) -> None:
    folder = artifact(tmp_path / "bnb", {}, weight=BYTES, SCB=ROWS[:, 0])
    check(bitsandbytes.read(folder, plain), plain, BYTES * ROWS / 127)
    zeros = np.full((OUTPUTS, 1), 3, np.int8)
    parts = {"_weight_qdata": BYTES, "_weight_scale": ROWS, "_weight_zero_point": zeros}
    check(torchao.read(artifact(tmp_path / "ao", {}, **parts), plain), plain, (BYTES - 3.0) * ROWS)


@pytest.mark.parametrize("bits", [4, 2])
def test_hqq(plain: Checkpoint, tmp_path: Path, bits: int) -> None:
    groups = NIBBLES.reshape(-1, 8)
    upper, lower = np.split(groups, 2)
    scales, zeros = (random.uniform(0.1, 8, (len(groups), 1)).astype(np.float16) for _ in "sz")
    parts = {"W_q": (upper << 4 | lower).astype(np.uint8), "scale": scales, "zero": zeros}
    parts |= {"nbits": np.array(bits, np.int32), "axis": np.array(1, np.int32)}
    reading = hqq.read(artifact(tmp_path / "hqq", {}, **parts), plain)
    if bits != 4:
        with pytest.raises(Unread, match=f"{bits} bits along axis 1"):
            reading(plain.tensors()[NAME])
        return
    expected = (groups - zeros.astype(np.float32)) * scales.astype(np.float32)
    check(reading, plain, expected.reshape(OUTPUTS, INPUTS))
