"""CTranslate2's float32 of every kind of attention: the predictions of transformers, or one line that says why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
RIGHT = ("", " theta", " llama3", " linear", " head_dim", " tied", " attention_bias", " mlp_bias", " epsilon")
OTHERS = (
    *("llama window", "gemma", "gemma theta", "gemma2 without caps", "gemma3", "phi3", "phi3 theta", "phi3 longrope"),
    *("phi3 partial", "phi3 epsilon", "gpt2", "gptj", "gpt_bigcode", "gpt_neox", "falcon"),
)
REFUSED = {
    **{f"{family} {kind}": f"RoPE scaling type '{kind}'" for family in FAMILIES for kind in ("dynamic", "yarn")},
    **{f"{family} gelu": f"its {family} has no hidden_act gelu, only silu" for family in FAMILIES},
    **{f"{family} window": "from position 33 of a window on" for family in ("qwen2", "qwen3", "phi3")},
    **{f"{family} window": "cannot score 200 tokens of this model at once" for family in ("mistral", "gemma3")},
    "gemma2": "it has no attn_logit_softcapping",
    "mixtral": "No conversion is registered for the model configuration MixtralConfig",
}


@pytest.fixture(scope="module")
def facts(torch_python: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = call(torch_python, REPO / "tests/build/ct2_architectures_checks.py", tmp_path_factory.mktemp("ct2"))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", [*(f"{family}{variant}" for family in FAMILIES for variant in RIGHT), *OTHERS])
def test_predictions_are_those_of_transformers(facts: dict[str, Any], name: str) -> None:
    """float32 differs in the last bits; llama3's scaling left out costs 1e-2 nats, a lost bias more."""
    assert "refused" not in facts[name]
    assert facts[name]["divergence"] < 1e-9


@pytest.mark.parametrize("name", REFUSED)
def test_what_ctranslate2_does_not_know_is_refused(facts: dict[str, Any], name: str) -> None:
    assert REFUSED[name] in facts[name]["refused"]


def test_every_model_is_judged(facts: dict[str, Any]) -> None:
    judged = {*(f"{family}{variant}" for family in FAMILIES for variant in RIGHT), *OTHERS, *REFUSED}
    assert judged == facts.keys()
