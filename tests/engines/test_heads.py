"""A head of transformers' models: it makes their logits of hidden states, or is found not to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLAIN = {"scale": 1.0, "cap": None, "bias": False}
HEADS = {
    "llama": PLAIN,
    "gemma2": PLAIN | {"cap": 2.0},
    "gemma3_text": PLAIN,
    "cohere": PLAIN | {"scale": 0.25},
    "granite": PLAIN | {"scale": 1 / 8},
    "phi": PLAIN | {"bias": True},
    "gpt2": PLAIN,
}


@pytest.fixture(scope="module")
def facts(call: Callable, torch_python: Path) -> dict[str, Any]:
    result = call(torch_python, "tests/engines/heads_checks.py")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_logits_are_the_models_own(facts: dict[str, Any], kind: str) -> None:
    assert facts[kind]["head"] == HEADS[kind]
    assert facts[kind]["off"] < 1e-6
    assert facts[kind]["largest"] > 0.9 * (HEADS[kind]["cap"] or 0)  # the cap is felt


def test_logits_that_no_head_makes_have_none(facts: dict[str, Any]) -> None:
    assert facts["another"]["head"] is None
