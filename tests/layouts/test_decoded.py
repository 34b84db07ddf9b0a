"""Models that their authors published in low bits, decoded by hand: every layout, in pieces, and what is kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MEMORY
from test_packed_layouts import E4M3, FP4, VALUE, float8, halves, words
from weight_files import save_file

from quantmill import fetch, layouts
from quantmill.checkpoint import shards
from quantmill.common.program import UserError
from quantmill.layouts import decoded, mxfp4, published
from quantmill.layouts.published import Published

random = np.random.default_rng(5)
NAME = "model.layers.0.mlp.up_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [4, 8]}
ROWS, COLUMNS = 10, 20  # of a matrix that blocks of 4 x 8 cut at both edges


def model(folder: Path, quantization: Any, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization, **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(folder: Path) -> Published:
    found = published.read(shards.find(folder))
    assert found
    return found


def values(found: Published, name: str = f"{NAME}.weight") -> np.ndarray:
    """Return a decoded weight as it would be written."""
    return layouts.array(found.tensors[name])


def assert_rounded(found: np.ndarray, expected: np.ndarray, bits: int = 8, least: float = 0) -> None:
    """Assert that values are the nearest ones to the expected, of a dtype with so many bits: bfloat16 has eight. They
    are half a step away at most, and hardly more because float32 comes before. least: half the least step."""
    assert found.shape == expected.shape
    _, exponents = np.frexp(expected)
    half_steps = np.maximum(np.ldexp(1.0, exponents - 1 - bits), least)
    assert (np.abs(found - expected) <= half_steps * (1 + 2.0**-14)).all()


def spread(scales: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the scale of each weight of a matrix of ROWS x COLUMNS."""
    return np.kron(scales, np.ones((height, width)))[:ROWS, :COLUMNS]


def codes(*shape: int) -> np.ndarray:
    """Return bytes of e4m3 whose values E4M3 lists."""
    return random.choice([*E4M3], shape)


SCALES = random.uniform(0.01, 1, (3, 3)).astype(np.float32)
MATRIX = codes(ROWS, COLUMNS)
FLOAT8 = {f"{NAME}.weight": float8(MATRIX), f"{NAME}.weight_scale_inv": SCALES}


@pytest.mark.parametrize("piece", [decoded.PIECE, 40])
def test_float8_in_blocks_that_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """A piece of 40 numbers is two rows, and a block has four."""
    monkeypatch.setattr(decoded, "PIECE", piece)
    found = read(model(tmp_path / "m", BLOCKS, FLOAT8 | {"model.norm.weight": np.ones(3, np.float16)}))
    assert_rounded(values(found), VALUE(MATRIX) * spread(SCALES, 4, 8))
    assert found.tensors.keys() == {f"{NAME}.weight", "model.norm.weight"}
    assert found.tensors["model.norm.weight"].dtype == "F16"
    assert found.nbytes == 2 * ROWS * COLUMNS + 6


@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 1, 1), ()])
def test_stacked_float8(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Experts with scales for their blocks, with a scale each, and with one for all."""
    stack, scales = codes(2, ROWS, COLUMNS), random.uniform(0.01, 1, shape).astype(np.float32)
    words = BLOCKS if shape[-1:] == (3,) else {"quant_method": "fp8"}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = read(model(tmp_path / "m", words, {name: float8(stack), f"{name}_scale_inv": scales}))
    sides = (4, 8) if shape[-1:] == (3,) else (ROWS, COLUMNS)
    each = [spread(scales[index] if shape else scales.reshape(1, 1), *sides) for index in (0, 1)]
    assert_rounded(values(found, name), VALUE(stack) * np.stack(each))


@pytest.mark.parametrize("shape", [(1,), ()])
def test_one_scale_of_compressed_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {f"{NAME}.weight": float8(MATRIX), f"{NAME}.weight_scale": np.full(shape, 0.3, np.float32)}
    tensors |= {
        f"{NAME}.input_scale": np.ones(1, np.float32),
        "model.layers.0.self_attn.k_scale": np.ones(1, np.float32),
    }
    found = read(model(tmp_path / "m", words("float-quantized", bits=8, strategy="tensor"), tensors))
    assert_rounded(values(found), VALUE(MATRIX) * np.float32(0.3))
    assert found.tensors.keys() == {f"{NAME}.weight"}


@pytest.mark.parametrize(("kind", "said"), [("int", "int8"), ("float", "float8")])
def test_the_naive_format_is_that_of_its_type(tmp_path: Path, kind: str, said: str) -> None:
    numbers = {"int": random.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8), "float": float8(MATRIX)}[kind]
    tensors = {f"{NAME}.weight": numbers, f"{NAME}.weight_scale": np.full(1, 0.3, np.float32)}
    scheme = words("naive-quantized", bits=8, strategy="tensor", type=kind)
    found = read(model(tmp_path / "m", scheme, tensors))
    assert found.facts["weights"] == f"{said} with a scale for each tensor"
    assert_rounded(values(found), (numbers if kind == "int" else VALUE(MATRIX)) * np.float64(np.float32(0.3)))


def test_only_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    """Gemma 3n has a parameter whose name ends as those of layers' outputs do."""
    kept = ("model.layers.0.altup.correct_output_scale", "model.layers.0.mlp.act.input_scale", "model.k_scale.weight")
    gone = (f"{NAME}.input_scale", f"{NAME}.output_zero_point", f"{NAME}_activation_scale", "model.layers.0.a.v_scale")
    tensors = FLOAT8 | {name: np.ones(1, np.float16) for name in (*kept, *gone)}
    assert read(model(tmp_path / "m", BLOCKS, tensors)).tensors.keys() == {f"{NAME}.weight", *kept}


@pytest.mark.parametrize("piece", [decoded.PIECE, 40])
def test_mxfp4_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Two experts of five outputs and 64 inputs, and the extremes of an exponent."""
    monkeypatch.setattr(mxfp4, "PIECE", piece)
    numbers = random.integers(0, 16, (2, 5, 2, 32))
    exponents = random.integers(100, 140, (2, 5, 2))
    exponents[0, 0] = 0, 251
    numbers[0, 0, 0, :2] = 1, 15  # 0.5 and -6
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {
        f"{name}_blocks": np.stack([[[halves(group[None])[0] for group in row] for row in each] for each in numbers])
    }
    tensors |= {f"{name}_scales": exponents.astype(np.uint8)}
    found = values(read(model(tmp_path / "m", {"quant_method": "mxfp4"}, tensors)), name)
    expected = np.take(FP4, numbers) * 2.0 ** (exponents[..., None] - 127.0)
    assert np.array_equal(found, expected.reshape(2, 5, 64).swapaxes(1, 2))


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack the numbers of each row into words of 32 bits, the first in the lowest bits; a last word may not be full."""
    each = 32 // bits
    packed = np.zeros((len(numbers), -(-numbers.shape[1] // each)), np.uint32)
    for column in range(numbers.shape[1]):
        packed[:, column // each] |= numbers[:, column].astype(np.uint32) << bits * (column % each)
    return packed.view(np.int32)


NIBBLES = random.integers(0, 16, (ROWS, COLUMNS))
STEPS = random.uniform(0.01, 1, (ROWS, 5)).astype(np.float32)
INT4 = {
    f"{NAME}.weight_packed": pack(NIBBLES, 4),
    f"{NAME}.weight_scale": STEPS,
    f"{NAME}.weight_shape": np.array([ROWS, COLUMNS]),
}
GROUPS = words("pack-quantized", group=4, strategy="group")


@pytest.mark.parametrize("piece", [decoded.PIECE, 100])
def test_int4_in_groups_with_zero_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """20 inputs are two words and a half; the ten rows' zero points one word and a quarter."""
    monkeypatch.setattr(decoded, "PIECE", piece)
    zeros = random.integers(0, 16, (ROWS, 5))
    more = {f"{NAME}.weight_zero_point": np.ascontiguousarray(pack(zeros.T, 4).T)}
    asymmetric = words("pack-quantized", group=4, strategy="group", symmetric=False)
    found = values(read(model(tmp_path / "m", asymmetric, INT4 | more)))
    assert_rounded(found, (NIBBLES - spread(zeros, 1, 4)) * spread(STEPS, 1, 4))


@pytest.mark.parametrize(
    "order", [np.array(random.permutation(COLUMNS) // 4, np.int32), np.full(COLUMNS, -1, np.int32)]
)
def test_inputs_in_the_order_of_their_groups(tmp_path: Path, order: np.ndarray) -> None:
    """llm-compressor writes -1 where it has no order."""
    found = values(read(model(tmp_path / "m", GROUPS, INT4 | {f"{NAME}.weight_g_idx": order})))
    of_input = np.arange(COLUMNS) // 4 if (order < 0).any() else order
    assert_rounded(found, (NIBBLES - 8.0) * STEPS[:, of_input])


def test_int8_in_words(tmp_path: Path) -> None:
    bytes_ = random.integers(0, 256, (ROWS, COLUMNS - 1))
    tensors = INT4 | {f"{NAME}.weight_packed": pack(bytes_, 8), f"{NAME}.weight_shape": np.array([ROWS, COLUMNS - 1])}
    tensors |= {f"{NAME}.weight_scale": STEPS[:, :1]}
    found = values(read(model(tmp_path / "m", words("pack-quantized", bits=8, strategy="channel"), tensors)))
    assert_rounded(found, (bytes_ - 128.0) * STEPS[:, :1])


@pytest.mark.parametrize(
    ("dtype", "code"), [("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32"), ("int8", "BF16")]
)
def test_the_dtype_is_that_of_the_config(tmp_path: Path, dtype: str, code: str) -> None:
    """bfloat16 where config.json does not name a float; the inner config of a multimodal model counts."""
    found = read(model(tmp_path / "m", BLOCKS, FLOAT8, text_config={"dtype": dtype}))
    assert found.tensors[f"{NAME}.weight"].dtype == code
    bits, least = {"F16": (11, 2.0**-25), "BF16": (8, 0), "F32": (24, 0)}[code]
    assert_rounded(values(found), VALUE(MATRIX) * spread(SCALES, 4, 8), bits, least)


def test_no_config_of_a_quantization_is_left(tmp_path: Path) -> None:
    both = {"text_config": {"vocab_size": 3, "quantization_config": BLOCKS}, "model_type": "x"}
    found = read(model(tmp_path / "m", None, FLOAT8, **both))
    assert found.config == {"text_config": {"vocab_size": 3}, "model_type": "x"}
    assert published.read(shards.find(model(tmp_path / "plain", None, {"w": np.ones(3, np.float16)}))) is None


def test_decoding_takes_little_memory(run_program: Callable, tmp_path: Path) -> None:
    """Stacked experts of 67 million weights, which would take 268 MB in float32."""
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (16, 1024, 128, 16)
    tensors = {f"{name}_blocks": np.zeros(shape, np.uint8), f"{name}_scales": np.full(shape[:3], 127, np.uint8)}
    result = run_program("fetch.link", model(tmp_path / "m", {"quant_method": "mxfp4"}, tensors), tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/model.safetensors").stat().st_size > 2 * 67_000_000
    assert result.memory < MEMORY / 2


@pytest.mark.parametrize("step", ["read", "write"])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """After its headers were read, and after its weights were."""
    folder = model(tmp_path / "m", BLOCKS, FLOAT8)
    files = {name: folder / name for name in ("config.json", "model.safetensors")}
    run = getattr(published, step)

    def and_touch(*arguments: Any) -> Any:
        result = run(*arguments)
        files["model.safetensors"].touch()
        return result

    monkeypatch.setattr(published, step, and_touch)
    with pytest.raises(UserError, match=r"model\.safetensors: was written to while it was read; run again when"):
        fetch.write_source(tmp_path / "out", files, {}, {}, tool="t", tool_version="1")
    assert not (tmp_path / "out").exists()
