"""Both engines against transformers' own generate and forward, on the demo model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from quantmill.devices import cpu


@pytest.fixture(scope="module")
def facts(demo: Path, torch_python: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    artifacts = tmp_path_factory.mktemp("engines") / "demo"
    shutil.copytree(demo / "artifacts/demo", artifacts)
    result = call(torch_python, REPO / "tests/engines/engines_checks.py", artifacts)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def modules(torch_python: Path, call: Callable) -> dict[str, Any]:
    result = call(torch_python, REPO / "tests/engines/module_checks.py")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["fp16", "ct2-float32"])
def test_greedy_tokens_are_those_of_generate(facts: dict[str, Any], name: str) -> None:
    assert facts[name]["tokens_equal"]
    assert facts[name]["count"] == 60


@pytest.mark.parametrize("name", ["fp16", "ct2-float32"])
def test_a_batch_changes_no_prompts_tokens(facts: dict[str, Any], name: str) -> None:
    assert facts[name]["batch_equal"]


def test_ctranslate2_aborts_no_program_at_its_end(demo: Path, torch_python: Path, call: Callable) -> None:
    """Every second one did, where the interpreter unloaded what had decoded."""
    lines = f"""
from quantmill import engines
from pathlib import Path

kept = []
for threads in (1, 2):
    kept.append(engines.load("ctranslate2", Path("{demo}/artifacts/demo/ct2-float32"), "cpu", threads))
    list(kept[-1].decode([[5, 6, 7]], 20))
"""
    for _ in range(5):
        result = call(torch_python, "-c", lines, cwd=REPO / "scripts")
        assert result.returncode == 0, result.stderr


def test_row_and_library_decode_in_one_process(demo: Path, torch_python: Path, call: Callable, tmp_path: Path) -> None:
    out = tmp_path / "ways.json"
    program = REPO / "benchmarks/same_process.py"
    short = ("--rounds", 1, "--tokens", 4)
    result = call(torch_python, program, out, demo / "artifacts/demo/fp16", "--transformers", "cpu", *short)
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert list(found) == ["by_hand", "row", "row_model_by_hand", "versions", "device"]
    assert [len(found[way]["ms"]) for way in ("by_hand", "row", "row_model_by_hand")] == [3, 3, 3]  # prompts
    assert {"torch", "transformers"} <= found["versions"].keys()
    assert found["device"]["device"] == "cpu"


@pytest.mark.parametrize(("vnni", "said"), [(True, {}), (False, {"CT2_USE_MKL": "1", "MKL_CBWR": "COMPATIBLE"})])
def test_the_gates_int8_does_not_saturate(call: Callable, torch_python: Path, vnni: bool, said: dict[str, str]) -> None:
    """Without VNNI, MKL must use instructions that add in 32 bits, and must know so before it is loaded."""
    lines = f"""
import json, os
from quantmill.devices import cpu
cpu.has_vnni = lambda: {vnni}
import quantmill.engines.ctranslate2
print(json.dumps({{name: os.environ[name] for name in ("CT2_USE_MKL", "MKL_CBWR") if name in os.environ}}))
"""
    result = call(torch_python, "-c", lines, PYTHONPATH=str(REPO / "scripts"), QUANTMILL_EXACT="1")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == said


def test_static_cache_and_merged_layers_decode_like_generate(facts: dict[str, Any]) -> None:
    assert facts["fp16"]["static_tokens_equal"]
    assert facts["fp16"]["merged"] == 2 * facts["fp16"]["layers"]  # q, k and v; gate and up


@pytest.mark.parametrize("name", ["fp16", "ct2-float32", "ct2-int8"])
def test_tokens_are_not_stamped_in_bursts(facts: dict[str, Any], name: str) -> None:
    assert facts[name]["evenness"] > 1 / 3


@pytest.mark.parametrize("name", ["fp16", "ct2-float32"])
def test_chunked_logits_are_those_of_one_forward(facts: dict[str, Any], name: str) -> None:
    assert facts[name]["logits_error"] < 1e-4
    assert facts[name]["dtype"] == "float32"


def test_options_are_the_engines_own(facts: dict[str, Any]) -> None:
    assert facts["options"] == {"transformers": "bfloat16", "ctranslate2": "int8_float32"}
    dtype, compute_type = facts["refused"]
    assert dtype == "engine transformers: dtype 'float61' is not one of float32, float16, bfloat16"
    assert "CTranslate2 cannot load it" in compute_type and "int3" in compute_type


def test_int8_logits_differ_but_not_much(facts: dict[str, Any]) -> None:
    sums_saturate = not any("vnni" in feature for feature in cpu.features())  # docs/FOOTGUNS.md, int8 without VNNI
    assert 1e-3 < facts["ct2-int8"]["logits_error"] < (4 if sums_saturate else 2)


def test_logits_come_in_chunks(facts: dict[str, Any]) -> None:
    for name in ("fp16", "ct2-float32"):
        assert max(facts[name]["chunks"]) == 16
        assert len(facts[name]["chunks"]) > 1


def test_inputs_are_rounded_the_same_where_layers_were_merged(modules: dict[str, Any]) -> None:
    """Or the gate takes what a GPU's engine rounds for an error of it."""
    assert modules["rounding"]["merged"] < 1e-5 < 1e-3 < modules["rounding"]["plain"]


def test_weight_bytes_leave_the_embedding_table_out(facts: dict[str, Any]) -> None:
    assert facts["fp16"]["weight_bytes"] == facts["linear_float32_bytes"]
    assert facts["ct2-float32"]["weight_bytes"] == pytest.approx(facts["linear_float32_bytes"], rel=1e-3)
    assert facts["ct2-int8"]["weight_bytes"] == pytest.approx(facts["linear_float32_bytes"] / 4, rel=0.03)


def test_the_arithmetic_is_what_the_library_says(facts: dict[str, Any]) -> None:
    assert facts["fp16"]["compute_type"] == "float32"
    assert facts["ct2-int8"]["compute_type"] == "int8_float32"
    assert facts["ct2-float32"]["versions"] == {"ctranslate2": "4.8.5"}
    saturates = "vnni" not in Path("/proc/cpuinfo").read_text()
    assert ("int8 products" in facts["ct2-int8"]["versions"]) == saturates


def test_end_of_sequence_is_never_chosen(facts: dict[str, Any]) -> None:
    transformers, ctranslate2 = facts["rigged"]
    assert len(transformers) == 20
    assert 1 not in transformers
    assert ctranslate2 == transformers


@pytest.mark.parametrize(("kind", "marlin"), [("Columns", True), ("Linear", False)])
def test_merged_layers_give_what_they_gave_apart(modules: dict[str, Any], kind: str, marlin: bool) -> None:
    names = [f"attention.{name}_proj" for name in "qkv"]
    expected = {"same": True, "all_parts": True, "names": names, "held": 0}
    found = modules["merging"][kind]
    assert found | expected == found
    assert (found["padded_left"], found["uneven_left"]) == (marlin, marlin)
    assert found["events"] == ["merged", "gone", *([] if marlin else ["merged", "merged"])]


def test_query_heads_that_share_keys_attend_as_transformers_own(modules: dict[str, Any]) -> None:
    assert max(modules["sharing"]) < 1e-6


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        ("llama", ["norm", "rotary embedding", "cache"]),
        ("qwen3", ["norm", "rotary embedding", "cache"]),
        ("gpt_neox", ["rotary embedding", "cache"]),  # LayerNorm is one kernel already
    ],
)
def test_a_static_cache_changes_nothing_in_other_models(modules: dict[str, Any], kind: str, fused: list[str]) -> None:
    refused = "its step cannot be captured: operation not permitted when stream is capturing"
    assert modules["static"][kind] == {"fits": True, "tokens": True, "logits": 0, "refused": refused, "fused": fused}


@pytest.mark.parametrize("kind", ["gemma2", "falcon"])
def test_other_attention_decodes_as_transformers_does(modules: dict[str, Any], kind: str) -> None:
    assert modules["static"][kind] == {"fits": False}


def test_a_token_reads_its_own_experts(modules: dict[str, Any]) -> None:
    experts = 2 * 8 * 3 * 64 * 96  # layers, experts, matrices of 64 to 96
    assert modules["experts"]["all"] - modules["experts"]["read"] == experts * 6 // 8
