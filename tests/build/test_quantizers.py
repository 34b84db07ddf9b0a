"""bitsandbytes, torchao, HQQ and llm-compressor: what their engines calculate is what their files say, by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, interpreter, line_of_refusal

# bits of a weight of the whole demo, of which the embedding and the head are 18% in float16, by arithmetic:
# 16 * 0.18 + 0.82 * what a weight of the blocks takes with its share of scales
FORMATS = {
    "bnb-nf4": (4.5, "uint8"),
    "bnb-nf4-dq": (4 + 8 / 64 + 32 / 64 / 256, "uint8"),
    "bnb-fp4": (4.5, "uint8"),
    "bnb-int8": (8, "int8"),
    "torchao-int8": (8, "int8"),
    "torchao-fp8": (8, "float8_e4m3fn"),
    "hqq-int4": (4.5, "uint8"),
    "ct-w4a16": (4 + 16 / 128, "int32"),
    "ct-w8a8": (8, "int8"),
    "ct-fp8": (8, "float8_e4m3fn"),
    "ct-nvfp4a16": (4.5, "uint8"),
    "ct-nvfp4": (4.5, "uint8"),
    "ct-mxfp4": (4.25, "uint8"),
}
ROUNDED = ("bnb-int8", "ct-w8a8", "ct-fp8", "ct-nvfp4", "ct-mxfp4")  # their activations too
AUTOROUND = ("autoround-int4", "autoround-awq-int4")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(demo: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("quantizers")
    for name in ("tokens", "fp16"):
        (work / name).symlink_to(demo / "artifacts/demo" / name)
    result = call(interpreter("quantizers"), REPO / "tests/build/quantizers_checks.py", demo / "artifacts/demo", work)
    assert result.returncode == 0, result.stderr
    stored = call(interpreter("gptqmodel"), REPO / "tests/build/quantization_checks.py", work, *AUTOROUND)
    assert stored.returncode == 0, stored.stderr
    by_hand = (work / "by-hand.json", work / "hqq-int4", "--transformers", "cpu", "--rounds", 1, "--tokens", 4)
    decoded = call(interpreter("quantizers"), REPO / "benchmarks/same_process.py", *by_hand)
    assert decoded.returncode == 0, decoded.stderr
    told = {"of AutoRound": json.loads(stored.stdout.splitlines()[-1]), "by hand": json.loads(by_hand[0].read_text())}
    return json.loads(result.stdout.splitlines()[-1]) | told


@pytest.mark.parametrize("name", FORMATS)
def test_the_engine_calculates_what_is_stored(facts: dict[str, Any], name: str) -> None:
    found = facts[name]
    bfloat16 = found["compute_type"] in ("bfloat16", "float4")
    assert found["layer_error"] < (2e-2 if bfloat16 else 1e-5)
    # bitsandbytes' last bits differ from ours, and each layer rounds what the one before it made
    assert found["divergence"] < (2 * found["rounding"] if name == "bnb-int8" else 1e-4 if bfloat16 else 1e-6)
    assert (found["rounding"] > 1e-4) == (name in ROUNDED)
    assert found["tokens"] == 10


@pytest.mark.parametrize("name", FORMATS)
def test_the_file_is_as_large_as_its_format(facts: dict[str, Any], name: str) -> None:
    bits, dtype = FORMATS[name]
    assert dtype in facts[name]["dtypes"]
    manifest = facts[name]["manifest"]
    share = 2 * 2048 * 256 / manifest["parameter_count"]  # embedding and head
    assert manifest["bits_per_weight"] == pytest.approx(16 * share + bits * (1 - share), rel=0.04)
    assert manifest["weight_bytes_per_token"] < manifest["weight_bytes"] - 2 * 2048 * 256 + 1


@pytest.mark.parametrize("name", FORMATS)
def test_all_weights_are_those_of_a_token_and_a_table(facts: dict[str, Any], name: str) -> None:
    """A token reads a row of the embedding table, which is held in 16 or 32 bits."""
    found = facts[name]
    assert found["held_bytes"] - found["weight_bytes"] in (2 * 2048 * 256, 4 * 2048 * 256)
    assert found["held_bytes"] > 0.95 * found["manifest"]["weight_bytes"]


@pytest.mark.parametrize("name", AUTOROUND)
def test_gptqmodel_calculates_what_autoround_stored(facts: dict[str, Any], name: str) -> None:
    found = facts["of AutoRound"][name]
    assert found["layers"] == 7 * 7 and found["unexpected"] == [] and found["tokens"] == 40
    assert found["error"] < 1e-2  # its kernels multiply in bfloat16


@pytest.mark.parametrize("name", [*FORMATS, *AUTOROUND])
def test_the_same_input_gives_the_same_bytes(facts: dict[str, Any], name: str) -> None:
    assert facts[name]["others"] == ["quantmill.json"]  # which says how long it took


def test_engines_say_what_they_are(facts: dict[str, Any]) -> None:
    assert facts["bnb-nf4"]["versions"]["kernel"] == "Linear4bit"
    assert facts["bnb-int8"]["versions"]["kernel"] == "Linear8bitLt"
    assert facts["torchao-fp8"]["versions"]["kernel"] == "Float8Tensor"
    assert facts["ct-w8a8"]["versions"]["kernel"] == "unpacked"
    assert facts["ct-w8a8"]["compute_type"] == facts["bnb-int8"]["compute_type"] == "int8"
    assert facts["ct-w4a16"]["manifest"]["calibration_sha256"]
    assert facts["ct-fp8"]["manifest"]["calibration_sha256"] is None


def test_a_scheme_that_calibrates_wants_its_text(demo: Path, call: Callable, tmp_path: Path) -> None:
    program = (interpreter("quantizers"), "scripts/quantmill", "build.llmcompressor", demo / "artifacts/demo/fp16")
    for given in ((), ("--calibration", "c.json", "--evaluation", "e.json")):
        result = call(*program, tmp_path / "out", "--parameters", '{"scheme": "W8A8"}', *given)
        assert "it; name --calibration, --evaluation, --samples and" in (
            line_of_refusal(result, tmp_path / "out") or ""
        )


def test_torchaos_dtype_holds_its_sums(facts: dict[str, Any]) -> None:
    """Those of integers come before their scales, and leave float16's range in a real model."""
    int8, float8 = (facts["torchao on a GPU"][name] for name in ("torchao-int8", "torchao-fp8"))
    assert (int8["dtype"], float8["dtype"]) == ("bfloat16", "float16")
    assert int8["finite"]["bfloat16"] == float8["finite"]["float16"] == 1 > int8["finite"]["float16"]


def test_what_a_file_says_is_not_run(facts: dict[str, Any]) -> None:
    """HQQ's library would evaluate it as Python."""
    assert facts["planted"] == {"tokens": 2, "ran": False, "would_have": True}


def test_a_row_and_hqq_decode_in_one_process(facts: dict[str, Any]) -> None:
    """By hand it is HQQ's own quantization of the fp16 artifact: transformers does not load HQQ's files."""
    found = facts["by hand"]
    assert [len(found[way]["ms"]) for way in ("by_hand", "row", "row_model_by_hand")] == [3, 3, 3]  # prompts
    assert {"hqq", "transformers", "torch"} <= found["versions"].keys()
