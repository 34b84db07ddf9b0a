"""Rotary parameters as transformers 4 and 5 spell them: one meaning, or refused."""

from pathlib import Path
from typing import Any

import pytest

from quantmill.build.fp16 import both_spellings
from quantmill.common.program import UserError

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PATH = Path("model/config.json")


def spell(**config: Any) -> dict[str, Any]:
    return both_spellings({"dtype": "float16"} | config, PATH)


def test_transformers_4_gets_its_own_spelling() -> None:
    """It ignores `rope_parameters`: with another base a model is another one."""
    found = spell(rope_parameters=LINEAR | {"rope_theta": 50.0})
    assert (found["torch_dtype"], found["rope_theta"], found["rope_scaling"]) == ("float16", 50.0, LINEAR)
    assert found["rope_parameters"] == LINEAR | {"rope_theta": 50.0}
    plain = spell(rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5})
    assert (plain["rope_theta"], plain["rope_scaling"], plain["partial_rotary_factor"]) == (50.0, None, 0.5)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 7.0},
        {"rope_theta": 7.0, "rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}},
        {},
    ],
)
def test_what_is_said_once_stays_as_it_is(config: dict[str, Any]) -> None:
    assert spell(**config) == config | {"dtype": "float16", "torch_dtype": "float16"}


def test_what_is_said_twice_alike_is_taken() -> None:
    rope = {"rope_theta": 50.0, **LINEAR}
    older = {"type": "linear", "factor": 4.0}
    assert spell(rope_parameters=rope, rope_theta=50.0, rope_scaling=older)["rope_scaling"] == LINEAR


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": YARN | {"rope_theta": 5.0}, "rope_scaling": LINEAR}, "contradict each other"),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": LINEAR}, "contradict each other"),
        ({"rope_parameters": LINEAR | {"rope_theta": 5.0}, "rope_scaling": LINEAR | {"factor": 2.0}}, "contradict"),
        ({"rope_parameters": LINEAR | {"rope_theta": 5.0}, "rope_theta": 6.0}, "two values of rope_theta, 5.0 and 6.0"),
        ({"rope_parameters": LINEAR | {"rope_theta": 5.0}, "rope_scaling": LINEAR}, "rope_scaling hides"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25}, "two values of partial"),
        ({"rope_parameters": [1]}, "rope_parameters is \\[1\\], not an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not an object"),
    ],
)  # fmt: skip
def test_a_contradiction_is_one_line(config: dict[str, Any], message: str) -> None:
    """Then transformers 5 takes rope_scaling, and ignores the base, which is only in rope_parameters."""
    with pytest.raises(UserError, match=message) as refusal:
        spell(**config)
    assert str(refusal.value).startswith("model/config.json: ")
