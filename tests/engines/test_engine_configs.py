"""Values in config.json that an engine stumbles over: one line with the artifact's name, or no matter at all."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

HARMLESS = [
    {},
    {"return_dict": False},
    {"torchscript": True},
    {"output_hidden_states": True},
    {"bos_token_id": 99999},
    {"bos_token_id": -1},
    {"pad_token_id": -5},
]
WITHOUT_STOP = [{"eos_token_id": 99999}, {"eos_token_id": -1}]
# transformers' own classes check the types of some keys, and nobody the sizes of others until they run
REFUSED = {
    "mistral with a window of none": {"model_type": "mistral", "sliding_window": 0},
    "a text for an id": {"eos_token_id": "2"},
    "a boolean for an id": {"bos_token_id": True},
    "padding beyond the vocabulary": {"pad_token_id": 99999},
    "an activation that is none": {"hidden_act": "nope"},
    "a text for a number": {"rms_norm_eps": "x"},
}


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, call: Callable, tools_python: Path, torch_python: Path
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("engines")
    for program, source, out in (
        ("fetch.link", REPO / "demo", "source"),
        ("checkpoint.to_safetensors", folder / "source", "safetensors"),
        ("build.fp16", folder / "safetensors", "fp16"),
    ):
        result = call(tools_python, "scripts/quantmill", program, source, folder / out)
        assert result.returncode == 0, result.stderr
    changes = json.dumps([*HARMLESS, *WITHOUT_STOP, *REFUSED.values()])
    command = [torch_python, REPO / "tests/engines/engine_configs_checks.py", folder / "fp16", folder]
    result = subprocess.run([*map(str, command)], input=changes, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_keys_that_change_no_answer_change_none(outcomes: list[dict[str, Any]]) -> None:
    plain = outcomes[0]
    assert plain["positions"] == 40
    assert outcomes[: len(HARMLESS)] == [plain] * len(HARMLESS)


def test_a_stop_id_beyond_the_vocabulary_stops_nothing(outcomes: list[dict[str, Any]]) -> None:
    expected = outcomes[0] | {"stop_ids": []}
    assert outcomes[len(HARMLESS) : len(HARMLESS) + len(WITHOUT_STOP)] == [expected] * len(WITHOUT_STOP)


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_stumbles_over_is_one_line(outcomes: list[dict[str, Any]], case: str) -> None:
    error = outcomes[len(HARMLESS) + len(WITHOUT_STOP) + list(REFUSED).index(case)]["error"]
    assert error.startswith(("ARTIFACT: transformers cannot load it (", "ARTIFACT: transformers fails on it ("))
    assert "\n" not in error
