"""Deferred tensors: what functions of torch return for them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

REFUSED = {
    "in place": "mul_",
    "in place by an operator": "add_",
    "into another": "add",
    "other data": "__set__",
    "a pointer": "data_ptr",
}


@pytest.fixture(scope="module")
def facts(torch_python: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = call(torch_python, REPO / "tests/build/deferred_checks.py", tmp_path_factory.mktemp("deferred"))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_functions_return_the_same_as_for_tensors(facts: dict[str, Any]) -> None:
    assert len(facts["same"]) > 15
    assert set(facts["same"].values()) == {True}


def test_stored_parts_have_the_same_bytes(facts: dict[str, Any]) -> None:
    """Only what is stored as it is, or joined by rows of one dtype, is copied without torch."""
    assert facts["stored"] == dict.fromkeys(("itself", "joined stored rows", "a parameter"), True)


def test_changes_in_place_are_refused(facts: dict[str, Any]) -> None:
    """They would be lost."""
    ends = "wants the elements of a weight before it is read"
    assert facts["refused"] == {what: f"{name} {ends}" for what, name in REFUSED.items()}
