"""Artifacts that others built: GPTQ's parts of a layer, compressed-tensors, bitsandbytes, torchao, HQQ and EXL3."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prebuilt_model import (
    CONFIG,
    GROUP,
    INPUTS,
    LAYER,
    OUTPUTS,
    fetch,
    fetch_prebuilt,
    halves,
    model,
    pack,
    random,
    refusal,
    write,
    write_theirs,
)

__all__ = ["fetch", "fetch_prebuilt", "model"]  # fixtures
ROWS = np.ones((OUTPUTS, 1), np.float32)
BYTES = random.integers(-127, 128, (OUTPUTS, INPUTS)).astype(np.int8)
FOUR = {"num_bits": 4, "symmetric": True, "group_size": GROUP}
EIGHT = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
# layout -> what its config says, and its tensors of the layer
OTHERS = {
    "compressed-tensors": [
        (
            {"format": "pack-quantized", "config_groups": {"group_0": {"weights": FOUR}}},
            {"weight_packed": np.zeros((OUTPUTS, 8), np.int32), "weight_scale": halves(OUTPUTS, 2)},
        ),
        (
            {"format": "int-quantized", "config_groups": {"group_0": {"weights": EIGHT}}},
            {"weight": BYTES, "weight_scale": ROWS},
        ),
    ],
    "bitsandbytes": [
        ({"load_in_8bit": True}, {"weight": BYTES, "SCB": ROWS[:, 0]}),
        (
            {"load_in_4bit": True},
            {"weight": np.zeros((OUTPUTS * INPUTS // 2, 1), np.uint8), "weight.quant_map": np.ones(16, np.float32)},
        ),
    ],
    "torchao": [
        (
            {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": None}}}},
            {"_weight_qdata": BYTES, "_weight_scale": ROWS},
        )
    ],
    "hqq": [
        (
            {"quant_config": {"weight_quant_params": {"group_size": 64}}},
            {"W_q": np.zeros((8, 64), np.uint8), "scale": halves(16, 1), "zero": halves(16, 1)},
        )
    ],
}
# outputs and inputs are whole blocks of 128
EXL3 = {"trellis": np.zeros((8, 8, 64), np.int16), "suh": halves(128), "svh": halves(128), "mul1": np.ones(1, np.int32)}
OTHER_CASES = [(layout, *case) for layout, cases in OTHERS.items() for case in cases]


@pytest.mark.parametrize(("layout", "words", "parts"), OTHER_CASES)
def test_other_layouts(fetch: Callable, tmp_path: Path, layout: str, words: dict[str, Any], parts: dict) -> None:
    config = CONFIG | {"quantization_config": words | {"quant_method": layout}}
    rest = {name: value for name, value in pack().items() if LAYER not in name}
    tensors = rest | {f"{LAYER}.{name}": value for name, value in parts.items()}
    fetch(write(tmp_path / "theirs", config, tensors), layout, good=True)
    content = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert content["weight_bytes_per_token"] == sum(value.nbytes for value in tensors.values())

    name, value = next((each, value) for each, value in parts.items() if value.ndim == 2)
    wrong = tensors | {f"{LAYER}.{name}": np.concatenate([value, value])}
    shutil.rmtree(tmp_path / "out")
    said = fetch(write(tmp_path / "larger", config, wrong), layout)
    assert f"its {LAYER}.{name} is {[len(value) * 2, value.shape[1]]}; its config makes {list(value.shape)} of" in said
    bare = rest | {f"{LAYER}.weight": BYTES}
    said = fetch(write(tmp_path / "bare", config, bare), layout)
    assert f"its {LAYER}.weight is I8, and nothing scales it" in said


def test_torchao_makes_no_other_objects(fetch: Callable, tmp_path: Path) -> None:
    """It calls whatever one of its modules has under that name."""
    inner = {"_type": "torch.dtype", "_data": {"x": [{"y": [1, {"_type": "quantize_"}]}]}}
    words = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": inner}}}
    said = refusal(fetch, tmp_path, {"quantization_config": words}, layout="torchao")
    assert "its config names 'quantize_'; Quantmill does not know how to check such an artifact" in said


def test_an_unknown_packing(fetch: Callable, tmp_path: Path) -> None:
    words = {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"x": {"weights": FOUR}}}
    said = refusal(fetch, tmp_path, {"quantization_config": words}, layout="compressed-tensors")
    assert "its format is 'marlin-24'; Quantmill does not know how to check such an artifact" in said


def state(**more: Any) -> np.ndarray:
    said = {"blocksize": 64, "dtype": "float16", "shape": [OUTPUTS, INPUTS], "quant_type": "nf4", **more}
    return np.frombuffer(json.dumps(said).encode(), np.uint8)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, None),
        ({"blocksize": 4096}, "has 16 scales of 4096 numbers each, and is 1024 numbers"),
        ({"blocksize": 10**12}, "has 16 scales of 1000000000000 numbers each"),
        ({"blocksize": -64}, "has 16 scales of -64 numbers each"),
        ({"blocksize": "64"}, "has 16 scales of 64 numbers each"),
        ({"shape": [10**6, 10**6]}, "says that it is [1000000, 1000000]"),
    ],
)
def test_a_quant_state_beyond_its_scales(
    fetch: Callable, tmp_path: Path, said: dict[str, Any], message: str | None
) -> None:
    parts = {"weight": np.zeros((OUTPUTS * INPUTS // 2, 1), np.uint8), "weight.quant_map": np.ones(16, np.float32)}
    parts |= {"weight.absmax": np.ones(16, np.float32), "weight.quant_state.bitsandbytes__nf4": state(**said)}
    words = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    tensors = {name: value for name, value in pack().items() if LAYER not in name}
    tensors |= {f"{LAYER}.{name}": value for name, value in parts.items()}
    theirs = write(tmp_path / "theirs", CONFIG | {"quantization_config": words}, tensors)
    assert (message or "") in fetch(theirs, "bitsandbytes", good=message is None)


@pytest.mark.parametrize(
    ("layer", "changes", "message"),
    [
        (LAYER, {}, None),
        (LAYER, {"trellis": np.zeros((8, 9, 64), np.int16)}, "has [8, 8] tiles"),
        (LAYER, {"trellis": np.zeros((8, 8, 63), np.int16)}, "3.9375 bits a weight"),
        (LAYER, {"svh": halves(64)}, f"{LAYER}.svh is not float16 of [128]"),
        (LAYER, {"suh": np.zeros(128, np.float32)}, f"{LAYER}.suh is not float16 of [128]"),
        ("lm_head", {}, None),  # which this model lacks: it ties its head to the embeddings
        ("lm_head", {"trellis": np.zeros((8, 64, 64), np.int16)}, "has [8, 8] tiles"),
    ],
)
def test_exl3_must_fit_its_kernels(
    fetch: Callable, tmp_path: Path, layer: str, changes: dict[str, np.ndarray], message: str | None
) -> None:
    tensors = {name: value for name, value in pack().items() if LAYER not in name}
    tensors |= {f"{LAYER}.{name}": value for name, value in EXL3.items()}
    tensors |= {f"{layer}.{name}": value for name, value in (EXL3 | changes).items()}
    config = CONFIG | {"quantization_config": {"quant_method": "exl3", "bits": 4.0}}
    said = fetch(write(tmp_path / "theirs", config, tensors), "exl3", good=message is None)
    assert (message or "") in said


ZEROS = np.zeros((INPUTS // GROUP, OUTPUTS * 4 // 32), np.int32)
ORDER = np.arange(INPUTS, dtype=np.int32) // GROUP


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("g_idx", ORDER + 1, f"model.safetensors: {LAYER}.g_idx names group 2, and its layer has 2; download it again"),
        (
            "g_idx",
            ORDER - 7,
            f"model.safetensors: {LAYER}.g_idx names group -7, and its layer has 2; download it again",
        ),
        ("g_idx", ORDER[:-1], f"{LAYER}.g_idx is I32 [63], where I32 [64] is expected, the group of each input"),
        (
            "g_idx",
            ORDER.astype(np.float32),
            f"{LAYER}.g_idx is F32 [64], where I32 [64] is expected, the group of each input",
        ),
        (
            "qzeros",
            ZEROS[:1],
            f"its {LAYER}.qzeros is [1, 2]; 4 bits and groups of 32, its config's, make [2, 2] of this",
        ),
        (
            "qzeros",
            ZEROS.T.copy()[:1],
            f"its {LAYER}.qzeros is [1, 2]; 4 bits and groups of 32, its config's, make [2,",
        ),
        ("qzeros", ZEROS.astype(np.float32), f"its {LAYER}.qzeros is F32, which no gptq artifact's is"),
        ("qzeros", None, f"lacks {LAYER}.qzeros, without which {LAYER} has no weights"),
        ("scales", None, f"lacks {LAYER}.scales, without which {LAYER} has no weights"),
        ("scales", ZEROS, f"its {LAYER}.scales is I32, which no gptq artifact's is"),
    ],
)
def test_parts_of_a_layer_must_fit(
    fetch: Callable, tmp_path: Path, part: str, value: np.ndarray | None, message: str
) -> None:
    """Kernels read a scale by the group that g_idx names, whether there is one or not."""
    tensors = pack() | {f"{LAYER}.g_idx": ORDER, f"{LAYER}.{part}": value}
    said = refusal(fetch, tmp_path, {}, {name: each for name, each in tensors.items() if each is not None})
    assert message in said
    assert str(tmp_path / "theirs") in said


def test_an_order_of_inputs_is_taken(fetch: Callable, tmp_path: Path) -> None:
    fetch(write_theirs(tmp_path, pack() | {f"{LAYER}.g_idx": ORDER[::-1].copy()}), good=True)
