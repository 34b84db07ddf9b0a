"""The gate: an engine that does not calculate what the weights say is refused, a large loss is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO


@pytest.fixture(scope="module")
def facts(torch_python: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = call(torch_python, REPO / "tests/gate/gate_checks.py", tmp_path_factory.mktemp("gate"))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["fp16", "our use of it"])
def test_unquantized_artifacts_predict_what_the_source_does(facts: dict[str, Any], name: str) -> None:
    found = facts[name]["found"]
    assert found["faithful"]["against"] == "the source's weights"
    assert found["faithful"]["divergence"] < 1e-9
    assert found["perplexity"] == pytest.approx(found["reference"], rel=1e-6)


def test_a_config_that_calculates_another_model_is_refused(facts: dict[str, Any]) -> None:
    """rope_theta 9,000 for 10,000: the perplexity hardly moves."""
    assert "does not calculate what the weights say" in facts["another config"]["error"]
    assert "perplexity 36.6, due 36.58" in facts["another config"]["error"]
    assert facts["another config"]["found"] is None


@pytest.mark.parametrize(("name", "against"), [("CTranslate2's converter", "the source's"), ("their int8", "its own")])
def test_dropped_scaling_is_refused_despite_lower_perplexity(facts: dict[str, Any], name: str, against: str) -> None:
    """The demo was trained without scaling: leaving llama3's out makes it better."""
    error = facts[name]["error"]
    assert f"nats from transformers on {against} weights" in error
    ours, due = (float(error.rpartition(word)[2].split(",")[0].rstrip(")")) for word in ("perplexity ", "due "))
    assert ours < 0.9 * due


def test_int8_differs_as_rounded_activations_do(facts: dict[str, Any]) -> None:
    faithful = facts["int8"]["found"]["faithful"]
    assert 1e-5 < faithful["divergence"] < faithful["tolerance"] < 0.01


def test_a_large_loss_is_a_result(facts: dict[str, Any]) -> None:
    found = facts["poor"]["found"]
    assert found["perplexity"] > 2 * found["reference"]
    assert found["faithful"]["divergence"] < 1e-9


def test_weights_of_another_model_are_refused(facts: dict[str, Any]) -> None:
    assert "from transformers on the source's weights" in facts["poor against the source"]["error"]


def test_a_study_may_be_stricter(facts: dict[str, Any]) -> None:
    error = facts["poor for a strict study"]["error"]
    assert "more than 1.2 times the reference's" in error
    assert error.endswith("raise max_perplexity_ratio to keep it")


def test_what_guesses_is_refused(facts: dict[str, Any]) -> None:
    assert "near that of guessing among 2048 tokens" in facts["garbage"]["error"]


def test_what_is_not_read_is_said(facts: dict[str, Any]) -> None:
    assert facts["unread"]["found"]["faithful"] == {"unchecked": "for a reason"}


def test_expectations_of_another_protocol_are_refused(facts: dict[str, Any]) -> None:
    assert "was made by gptq-2048, not by llamacpp-512" in facts["another protocol"]["error"]


def test_weights_beyond_float16_stay_what_they_are(facts: dict[str, Any]) -> None:
    """bfloat16 reaches 3e38: the reference keeps such a tensor, and a GPU calculates in bfloat16 then."""
    large = facts["large"]
    assert large["kept"] == {"not_float16": ["model.layers.0.mlp.up_proj.weight"]}
    assert large["found"]["faithful"]["divergence"] < 1e-6
    assert large["found"]["perplexity"] == pytest.approx(42.84, rel=0.02)  # bfloat16's rounding alone
    assert large["in float16"] == ["bfloat16", True]


def test_models_that_were_run_are_removed(facts: dict[str, Any]) -> None:
    assert facts["left"] == []
