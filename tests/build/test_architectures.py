"""GPTQ and AWQ of models that are not Llama: built, loaded and near their float16, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, interpreter

FEW, MORE = ["mistral", "mamba"], ["qwen2", "gemma", "gemma3", "phi3", "olmo2"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MORE]


@pytest.fixture(scope="module")
def facts(
    request: pytest.FixtureRequest, demo: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Of all architectures where slow tests run, else of a few."""
    wanted = {item.callspec.params.get("architecture") for item in request.session.items if hasattr(item, "callspec")}
    program, work = REPO / "tests/build/architectures_checks.py", tmp_path_factory.mktemp("architectures")
    names = [*FEW, *(name for name in MORE if name in wanted)]
    result = call(interpreter("gptqmodel"), program, work, demo / "artifacts/demo", *names)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("architecture", ["mistral", *SLOW])
@pytest.mark.parametrize("tool", ["gptq", "awq"])
def test_other_architectures(facts: dict[str, Any], architecture: str, tool: str) -> None:
    """Logits point where float16's do: two layers of random weights lose 1 to 6% to four bits, a lost bias 26%."""
    fact = facts[f"{architecture} {tool}"]
    if (architecture, tool) == ("phi3", "awq"):  # gptqmodel would load it as another model
        assert "splits model.layers.0.mlp.gate_up_proj.weight wrongly; gptq-int4 is right" in fact["error"]
        assert not fact["published"]
        return
    if (architecture, tool) == ("gemma3", "awq"):  # autoawq does not know it, and gptqmodel not its two kinds of layers
        assert "gptqmodel cannot quantize it (Gemma3RotaryEmbedding.forward() missing" in fact["error"]
        assert not fact["published"]
        return
    assert fact["error"] == ""
    if tool == "awq":  # autoawq, where it knows the architecture
        assert fact["tool"] == ("gptqmodel" if architecture == "olmo2" else "autoawq")
    assert fact["cosine"] > 0.93
    assert fact["tokens"] == 20


@pytest.mark.parametrize("tool", ["gptq", "awq"])
def test_an_unknown_architecture_is_refused_by_name(facts: dict[str, Any], tool: str) -> None:
    fact = facts[f"mamba {tool}"]
    assert "gptqmodel cannot quantize it" in fact["error"]
    assert "mamba" in fact["error"].partition("cannot quantize it")[2]
    assert not fact["published"]


@pytest.mark.parametrize("named_by", ["model", "tokenizer", "engine"])
def test_python_of_the_models_folder_does_not_run(facts: dict[str, Any], named_by: str) -> None:
    """Without our guard gptqmodel and its tokenizer's loader run it, whatever `trust_remote_code` says."""
    assert facts[f"code {named_by}"]["ran"] is False
    assert [bool(error) for error in facts["code model"]["errors"]] == [False, False]
    assert [bool(error) for error in facts["code tokenizer"]["errors"]] == [True, True]


def test_a_job_for_a_cpu_leaves_the_cards_alone(facts: dict[str, Any]) -> None:
    """Without this autoawq takes any GPU that it sees."""
    assert facts["cards"] == ""
