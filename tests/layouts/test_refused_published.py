"""Models in low bits that are refused in one line: other layouts, and tensors that do not fit each other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import line_of_refusal
from test_decoded import BLOCKS, COLUMNS, FLOAT8, GROUPS, INT4, NAME, ROWS, SCALES, STEPS, model
from test_packed_layouts import float8, words

from quantmill.checkpoint import shards
from quantmill.common.program import UserError
from quantmill.layouts import published

AGAIN = "download the model again"
STACKED = "model.layers.0.mlp.experts.down_proj"
MXFP4 = {f"{STACKED}_blocks": np.zeros((2, 4, 3, 16), np.uint8), f"{STACKED}_scales": np.ones((2, 4, 3), np.uint8)}
ZEROS = np.zeros((2, 5), np.int32)
ORDER = np.arange(COLUMNS, dtype=np.int32) // 4
ASYMMETRIC = words("pack-quantized", group=4, strategy="group", symmetric=False)


def with_scale(value: float) -> np.ndarray:
    changed = SCALES.copy()
    changed[1, 2] = value
    return changed


def refuse(folder: Path, quantization: Any, tensors: dict[str, Any], **config: Any) -> str:
    """Return the error of reading a model or decoding it. A tensor that is None is left out."""
    stored = {name: value for name, value in tensors.items() if value is not None}
    source = shards.find(model(folder, quantization, stored, **config))
    (folder / "out").mkdir()
    with pytest.raises(UserError) as error:
        found = published.read(source)
        assert found
        published.write(found, folder / "out")
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{folder}")
    return line.removeprefix(f"{folder}").removeprefix("/model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"weight_scale_inv": with_scale(0)},
            f"weight_scale_inv is 0 at [1, 2], and a scale is a positive number; {AGAIN}",
        ),
        ({"weight_scale_inv": with_scale(np.nan)}, "weight_scale_inv is nan at [1, 2], and a scale is a positive"),
        ({"weight_scale_inv": with_scale(np.inf)}, "weight_scale_inv is inf at [1, 2], and a scale is a positive"),
        ({"weight_scale_inv": with_scale(-1)}, "weight_scale_inv is -1 at [1, 2], and a scale is a positive number"),
        ({"weight_scale_inv": None}, f"weight is quantized, and {NAME}.weight_scale_inv is missing; {AGAIN}"),
        ({"weight": None}, f"weight_scale_inv scales F8_E4M3, and {NAME}.weight is missing; {AGAIN}"),
        ({"weight": np.ones((ROWS, COLUMNS), np.float16)}, f"scales F8_E4M3, and {NAME}.weight is F16; {AGAIN}"),
        (
            {"weight_scale_inv": SCALES[:, :2]},
            f"scale_inv is [3, 2], and blocks of 4 x 8 of [{ROWS}, {COLUMNS}] make it [3, 3]; correct config.json, or",
        ),
        ({"weight_scale_inv": np.ones((3, 3), np.int32)}, "weight_scale_inv is I32, and scales are floats"),
        ({"weight": float8(np.full((ROWS, COLUMNS), 0x7F))}, f"weight is NaN at [0, 0]; {AGAIN}"),
        ({"weight_scale_inv": np.full((3, 3), 3e38, np.float32)}, "weight is beyond what BF16 holds at ["),
        ({"weight": float8(np.zeros(5))}, "weight is [5], and float8 is read of matrices; refused"),
    ],
)
def test_float8_that_does_not_fit_its_scales(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    tensors = FLOAT8 | {f"{NAME}.{part}": value for part, value in change.items()}
    assert said in refuse(tmp_path / "m", BLOCKS, tensors)


@pytest.mark.parametrize("size", [[4, 4], [2, 8], [8, 16]])
def test_a_size_of_blocks_that_lies(tmp_path: Path, size: list[int]) -> None:
    said = refuse(tmp_path / "m", BLOCKS | {"weight_block_size": size}, FLOAT8)
    assert f"weight_scale_inv is [3, 3], and blocks of {size[0]} x {size[1]} of [{ROWS}, {COLUMNS}] make it [" in said


@pytest.mark.parametrize("size", [[5, 8], [0, 8], [-4, 8], [4], [4, 8, 8], "4x8", 4, [4.0, 8.0], [True, 8], [2**40, 8]])
def test_a_size_of_blocks_that_proves_nothing(tmp_path: Path, size: Any) -> None:
    """Ten rows are three blocks of four, and of five as well: only of powers of two does one alone fit the scales."""
    said = refuse(tmp_path / "m", BLOCKS | {"weight_block_size": size}, FLOAT8)
    assert f"(fp8), and its weight_block_size is {size!r}, where two powers of two are expected; name a model" in said


def test_float16_is_not_wide_enough(tmp_path: Path) -> None:
    said = refuse(tmp_path / "m", BLOCKS, FLOAT8 | {f"{NAME}.weight_scale_inv": SCALES * 1000}, dtype="float16")
    assert f"{NAME}.weight is beyond what F16 holds at [" in said
    assert said.endswith(f"; let config.json say a dtype of more range, or {AGAIN}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"_scales": np.full((2, 4, 3), 255, np.uint8)},
            f"{STACKED}_scales is nan at [0, 0, 0], and a scale is a positive",
        ),
        ({"_scales": None}, f"{STACKED}_blocks is quantized, and {STACKED}_scales is missing; {AGAIN}"),
        ({"_blocks": None}, f"{STACKED}_scales is quantized, and {STACKED}_blocks is missing; {AGAIN}"),
        (
            {"_scales": np.ones((2, 4, 2), np.uint8)},
            f"_scales is [2, 4, 2], and the groups of {STACKED}_blocks make it [",
        ),
        (
            {"_blocks": np.ones((2, 4, 3, 8), np.uint8)},
            "_blocks is [2, 4, 3, 8], and groups of 32 make it [2, 4, 3, 16]",
        ),
        ({"_blocks": np.ones((4, 3, 16), np.uint8)}, "_blocks is U8 [4, 3, 16], where U8 of 4 sizes is expected"),
        ({"_scales": np.ones((2, 4, 3), np.float32)}, "_scales is F32 [2, 4, 3], where U8 of 3 sizes is expected"),
        (
            {"_scales": np.full((2, 4, 3), 254, np.uint8), "_blocks": np.full((2, 4, 3, 16), 0x77, np.uint8)},
            "beyond what BF16 holds at [0, 0, 0]",
        ),
        ({"": np.ones(3, np.float16)}, f"holds {STACKED} twice, once in low bits; only one of them can be right"),
    ],
)
def test_mxfp4_that_does_not_fit_its_scales(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    tensors = MXFP4 | {f"{STACKED}{part}": value for part, value in change.items()}
    assert said in refuse(tmp_path / "m", {"quant_method": "mxfp4"}, tensors)


@pytest.mark.parametrize(
    ("scheme", "change", "said"),
    [
        (GROUPS, {"weight_scale": None}, f"weight_packed is quantized, and {NAME}.weight_scale is missing; {AGAIN}"),
        (GROUPS, {"weight_packed": None}, f"weight_scale is quantized, and {NAME}.weight_packed is missing; {AGAIN}"),
        (GROUPS, {"weight_shape": None}, f"weight_scale is quantized, and {NAME}.weight_shape is missing; {AGAIN}"),
        (GROUPS, {"weight_scale": STEPS * 0}, "weight_scale is 0 at [0, 0], and a scale is a positive number"),
        (GROUPS, {"weight_scale": STEPS * np.float32(np.nan)}, "weight_scale is nan at [0, 0], and a scale is a"),
        (GROUPS, {"weight_scale": STEPS.astype(np.float64) * 1e-300}, "weight_scale is 0 at [0, 0], and a scale is a"),
        (GROUPS, {"weight_scale": STEPS.astype(np.float64) * 1e300}, "weight_scale is inf at [0, 0], and a scale is a"),
        (GROUPS, {"weight_shape": np.array([9, COLUMNS])}, "weight_shape is [9, 20], and "),
        (GROUPS, {"weight_shape": np.array([ROWS, 2**40])}, "weight_packed is [10, 3], and int4 in groups of 4"),
        (GROUPS, {"weight_shape": np.array([ROWS, -8])}, "weight_packed is [10, 3], and int4 in groups of 4"),
        (GROUPS, {"weight_shape": np.ones(2, np.float32)}, "weight_shape is [2], and "),
        (
            GROUPS,
            {"weight_packed": STEPS},
            f"weight_packed is F32 [{ROWS}, 5], and int4 in groups of 4 is a matrix of I32",
        ),
        (GROUPS, {"weight_g_idx": ORDER + 1}, "weight_g_idx does not put as many inputs into each of 5 groups"),
        (GROUPS, {"weight_g_idx": ORDER * 0}, "weight_g_idx does not put as many inputs into each of 5 groups"),
        (GROUPS, {"weight_g_idx": ORDER[:-4]}, "weight_g_idx does not put as many inputs into each of 5 groups"),
        (GROUPS, {"weight_g_idx": STEPS}, "weight_g_idx does not put as many inputs into each of 5 groups"),
        (GROUPS, {"weight_zero_point": ZEROS + 1}, "weight_zero_point is not 0, and config.json says symmetric"),
        (ASYMMETRIC, {}, f"is quantized, and {NAME}.weight_zero_point is missing; {AGAIN}"),
        (
            ASYMMETRIC,
            {"weight_zero_point": ZEROS[:1]},
            "weight_zero_point is [1, 5], and int4 in groups of 4, with zero",
        ),
        (
            ASYMMETRIC,
            {"weight_zero_point": np.ones((2, 5), np.float32)},
            "weight_zero_point is F32, and zero points are",
        ),
        (words("pack-quantized", group=8, strategy="group"), {}, "weight_scale is [10, 5], and int4 in groups of 8"),
        (
            words("pack-quantized", group=8, strategy="group"),
            {"weight_scale": STEPS[:, :3]},
            f"{NAME} has {COLUMNS} inputs, no multiple of 8; {AGAIN}",
        ),
        (words("float-quantized", bits=8), {}, f"weight_scale is quantized, and {NAME}.weight is missing"),
    ],
)
def test_int4_that_does_not_fit_its_scheme(tmp_path: Path, scheme: Any, change: dict[str, Any], said: str) -> None:
    tensors = INT4 | {f"{NAME}.{part}": value for part, value in change.items()}
    assert said in refuse(tmp_path / "m", scheme, tensors)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
@pytest.mark.parametrize("by", [{}, BLOCKS, words("float-quantized", bits=8, strategy="channel")])
def test_a_matrix_without_weights(tmp_path: Path, shape: tuple[int, int], by: dict[str, Any]) -> None:
    """Its blocks would have no size."""
    part = "weight_scale" if "config_groups" in by else "weight_scale_inv"
    tensors = {f"{NAME}.weight": float8(np.ones(shape)), f"{NAME}.{part}": np.ones((5, 1), np.float32)}
    said = refuse(tmp_path / "m", {"quant_method": "fp8"} | by, tensors)
    assert said.startswith(f": {NAME}.weight is empty (its shape is {[*shape]}); save the model again")


@pytest.mark.parametrize("shape", [(0, 4, 2, 16), (2, 0, 2, 16), (2, 4, 0, 16)])
def test_experts_without_weights(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {f"{STACKED}_blocks": np.zeros(shape, np.uint8), f"{STACKED}_scales": np.zeros(shape[:-1], np.uint8)}
    said = refuse(tmp_path / "m", {"quant_method": "mxfp4"}, tensors)
    assert "is empty (its shape is [" in said


def test_a_float8_layer_without_scales(tmp_path: Path) -> None:
    tensors = {f"{NAME}.weight": float8(np.ones((ROWS, COLUMNS)))}
    said = refuse(tmp_path / "m", words("float-quantized", bits=8, strategy="channel"), tensors)
    assert f"{NAME}.weight is quantized, and {NAME}.weight_scale is missing; {AGAIN}" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "nvfp4-pack-quantized", "type": "float", "strategy": "tensor_group", "group_size": 16}, "nvfp4"),
        ({"format": "mxfp4-pack-quantized", "type": "float", "group_size": 32}, "mxfp4-pack-quantized"),
        ({"format": "marlin-24"}, "its format is 'marlin-24'"),
        ({"format": "dense"}, "its format is 'dense'"),
        ({"format": ["hostile"]}, "its format is ['hostile']"),
        ({"num_bits": 3}, "its weights have 3 bits"),
        ({"num_bits": "4"}, "its weights have '4' bits"),
        ({"num_bits": [4]}, "its weights have [4] bits"),
        ({"num_bits": 4.0}, "its weights have 4.0 bits"),
        ({"symmetric": "no"}, "its weights are not symmetric, by 'group'"),
        ({"symmetric": None}, "its weights are not symmetric, by 'group'"),
        ({"strategy": "attn_head"}, "its scales are by 'attn_head'"),
        ({"strategy": ["group"]}, "its scales are by "),
        ({"group_size": 24}, "its scales are of 1 x 24, where powers of two are expected"),
        ({"group_size": 0}, "its scales are by 'group' of 0"),
        ({"group_size": "4"}, "its scales are by 'group' of '4'"),
        ({"strategy": "block", "block_structure": [3, 4]}, "its scales are of 3 x 4, where powers of two"),
        ({"strategy": "block", "block_structure": "4x4"}, "its scales are by 'block' of '4x4'"),
        (
            {"symmetric": False, "strategy": "block", "block_structure": [4, 4]},
            "its weights are not symmetric, by 'block'",
        ),
        ({"format": "float-quantized", "num_bits": 8, "symmetric": False}, "its weights are not symmetric"),
        ({"type": "float"}, "its format is 'pack-quantized', by 'group' of 'float'"),
    ],
)
def test_an_unknown_scheme_of_compressed_tensors(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    known = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 4} | changes
    group = {"format": known.pop("format", "pack-quantized"), "weights": known}
    found = refuse(tmp_path / "m", {"quant_method": "compressed-tensors", "config_groups": {"g": group}}, INT4)
    assert found.startswith(": its weights are quantized (compressed-tensors), and ")
    assert said in found
    assert found.endswith("; name a model with the original weights")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"transform_config": {"rotations": 1}}, "its format is 'pack-quantized'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "its format is 'pack-quantized', sparse"),
        ({"sparsity_config": "hostile"}, "its format is 'pack-quantized', sparse"),
        ({"config_groups": {"a": {}, "b": {}}}, "its layers are quantized in several ways"),
        ({"config_groups": ["hostile"]}, "its layers are quantized in several ways"),
        ({"config_groups": {"a": []}}, "it does not say how its weights are quantized"),
    ],
)
def test_layers_that_are_changed_in_other_ways(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    assert f"(compressed-tensors), and {said}; name a model" in refuse(tmp_path / "m", GROUPS | more, INT4)


@pytest.mark.parametrize("sparsity", [None, {}, {"format": "dense", "targets": []}])
def test_a_config_that_says_dense(tmp_path: Path, sparsity: Any) -> None:
    folder = model(tmp_path / "m", GROUPS | {"sparsity_config": sparsity, "transform_config": {}}, INT4)
    assert published.read(shards.find(folder))


METHODS = ["gptq", "awq", "bitsandbytes", "torchao", "hqq", "fbgemm_fp8", "quark", "modelopt", "FP8", None, ["fp8"]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inner", [False, True])
def test_other_methods_cannot_be_a_source(method: Any, inner: bool) -> None:
    words = {"quantization_config": {"quant_method": method, "bits": 4}}
    name = method if isinstance(method, str) else "by an unknown method"
    with pytest.raises(UserError) as error:
        published.scheme("org/m", {"text_config": words} if inner else words)
    assert str(error.value) == f"org/m: its weights are quantized ({name}); name a model with the original weights"


@pytest.mark.parametrize("words", [["hostile"], "fp8", 7])
def test_a_config_that_is_no_object(words: Any) -> None:
    with pytest.raises(UserError, match=r"m: its weights are quantized \(by an unknown method\)"):
        published.scheme("m", {"quantization_config": words})
    assert published.scheme("m", {"quantization_config": None, "text_config": ["hostile"]}) is None


def test_a_config_that_speaks_of_other_weights(tmp_path: Path) -> None:
    said = refuse(tmp_path / "m", BLOCKS, {f"{NAME}.weight": np.ones((ROWS, COLUMNS), np.float16)})
    assert said == (
        ": config.json says that its weights are quantized (fp8), and none is; remove its quantization_config, or "
        f"{AGAIN}"
    )


def test_pickled_weights_in_low_bits(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", BLOCKS, FLOAT8)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"m: its quantized weights are pickled; name a model with safetensors"):
        published.read(shards.find(folder))


def test_a_row_that_no_model_has(tmp_path: Path) -> None:
    wide = float8(np.zeros((1, 2**17 + 1)))
    tensors = {f"{NAME}.weight": wide, f"{NAME}.weight_scale_inv": np.ones((1, 1), np.float32)}
    said = refuse(tmp_path / "m", {"quant_method": "fp8"}, tensors)
    assert said == f": {NAME}.weight is [1, {2**17 + 1}], wider than any model's; refused"


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_left_of_a_refused_model(run_program: Callable, tmp_path: Path, late: bool) -> None:
    """A scale is seen before the first weight is written, a weight that is NaN only then."""
    tensors = (
        {f"{NAME}.weight": float8(np.full((ROWS, COLUMNS), 0x7F))} if late else {f"{NAME}.weight_scale_inv": SCALES * 0}
    )
    folder = model(tmp_path / "m", BLOCKS, FLOAT8 | tensors)
    line = line_of_refusal(run_program("fetch.link", folder, tmp_path / "out"), tmp_path / "out")
    assert line and line.startswith(f"error: {folder}/model.safetensors: {NAME}.weight")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == BLOCKS
