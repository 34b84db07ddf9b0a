"""Models of transformers that run block by block: equal to the whole, in the memory of two blocks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmill.engines.streamed.relay import Relay

KINDS = 29


@pytest.fixture(scope="module")
def facts(call: Callable, torch_python: Path) -> dict[str, Any]:
    result = call(torch_python, "tests/engines/blocks_checks.py")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_model_is_the_same_block_by_block(facts: dict[str, Any]) -> None:
    """Dense, with windows, experts, latent attention, recurrent blocks, and blocks that read those before them."""
    kinds = {kind: found for kind, found in facts.items() if isinstance(found, dict)}
    assert len(kinds) == KINDS
    assert [kind for kind, found in kinds.items() if found != {"memory": True, "disk": True, "decodes": False}] == []
    assert facts["unannounced"]


def test_a_broken_model_is_one_line(facts: dict[str, Any]) -> None:
    assert facts["not finite"] == (
        "MODEL: window 0: the states after block 2 are not finite; the weights are broken, or too large for this dtype"
    )
    name = "model.layers.2.mlp.down_proj.weight"
    assert facts["missing"] == f"MODEL: {name} cannot be loaded; download the model again"
    assert facts["another shape"] == f"MODEL: {name} cannot be loaded; download the model again"


def test_a_full_disk_is_one_line_and_the_model_goes_on_later(facts: dict[str, Any]) -> None:
    assert facts["full disk"].startswith("no room for the activations of all texts (")
    assert facts["goes on"]


@pytest.mark.parametrize("layers", [12, 36])
def test_memory_is_that_of_two_blocks_at_any_depth(call: Callable, torch_python: Path, layers: int) -> None:
    result = call(torch_python, "tests/engines/blocks_memory.py", str(layers))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["blocks_added"] < 6  # two, activations, and what the libraries take when they first load one
    assert found["streams_under_a_limit"]


def walk(relay: Relay, text: str, told: list[str], blocks: list[int]) -> Callable[[], str]:
    """Return a forward that tells what it does."""

    def forward() -> str:
        for block in blocks:
            relay.pause(block)
            told.append(f"{text}{block}")
        return text

    return forward


def test_every_text_runs_through_a_block_before_the_next_one_is_loaded() -> None:
    relay, told = Relay(2), []
    found = relay.run(
        [walk(relay, text, told, [0, 1]) for text in "ab"],
        lambda block: told.append(f"load {block}"),
        lambda block: told.append(f"free {block}"),
    )
    assert found == ["a", "b"]
    steps = ["load -1", "free -1", "load 0", "a0", "b0", "free 0", "load 1", "a1", "b1", "free 1"]
    assert told == steps


@pytest.mark.parametrize("blocks", [[1, 0], [0], [0, 0], [0, 1, 1], []])
def test_blocks_in_another_order_are_refused(blocks: list[int]) -> None:
    relay, told = Relay(2), []
    with pytest.raises(ValueError, match=r"^block (None|\d) follows block (-1|\d)$"):
        relay.run(
            [walk(relay, "a", told, [0, 1]), walk(relay, "b", told, blocks)], lambda block: None, lambda block: None
        )


def test_a_failing_forward_ends_the_others() -> None:
    relay, ended = Relay(2), []

    def fails() -> None:
        relay.pause(0)
        raise OSError("broken")

    def waits() -> None:
        try:
            relay.pause(0)
            relay.pause(1)
        finally:
            ended.append(True)

    with pytest.raises(OSError, match="broken"):
        relay.run([waits, fails], lambda block: None, lambda block: None)
    assert ended == [True]
