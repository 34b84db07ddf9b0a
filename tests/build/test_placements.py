"""Places of a quantizer on the GPU: the choice by memory, by hand, and the tools with each of their placements."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import AUTOGPTQ, REPO, interpreter
from recorded_rows import of_file

from quantmill.build.quantizer import placement
from quantmill.build.quantizer.placement import Placement, Samples, choose

TOOLS = {"gptqmodel": ["gptq"], "quantizers": ["llmcompressor", "autoround"]}  # by environment
TOOLS |= {"autogptq": ["autogptq"]} if AUTOGPTQ else {}
SHAPE = replace(of_file("demo/config.json"), parameters=1000 * 10**6, block=100 * 10**6, hidden=1000, heads=10)
SAMPLES = Samples(tokens=10_000, length=100)
WHOLE = Placement(shared="samples", fixed=100, model=2, kept=4, step=50)
LAYERS = Placement("host", "host", shared="samples", fixed=100, layer=16, step=50, host_kept=4, host_gpu=1000)
SPLIT = replace(LAYERS, shared="layer")
STEPS = replace(LAYERS, batch=8, shared="", pairs=10)


def test_memory_of_a_gpu_is_the_sum_of_what_it_holds() -> None:
    # 100 MB; 2 bytes a weight; 4 bytes of 10,000 tokens of 1,000 numbers; 50 bytes of the same of 100 tokens
    assert WHOLE.gpu_bytes(SHAPE, SAMPLES, 1) == 100e6 + 2e9 + 40e6 + 5e6
    assert WHOLE.gpu_bytes(SHAPE, SAMPLES, 2) == 100e6 + 2e9 + 20e6 + 5e6  # each has half of the samples
    assert LAYERS.gpu_bytes(SHAPE, SAMPLES, 2) == 100e6 + 1600e6 + 5e6
    assert SPLIT.gpu_bytes(SHAPE, SAMPLES, 2) == 100e6 + 800e6 + 5e6
    # 8 samples, with 10 bytes a pair of 100 tokens in 10 heads
    assert STEPS.gpu_bytes(SHAPE, SAMPLES, 2) == 100e6 + 1600e6 + 8 * 5e6 + 8 * 1e6
    assert [each.gpus(2) for each in (WHOLE, SPLIT, STEPS)] == [2, 2, 1]


def test_memory_of_the_host_is_what_the_gpu_does_not_hold() -> None:
    assert WHOLE.host_bytes(SHAPE, SAMPLES, 2) == 0
    assert LAYERS.host_bytes(SHAPE, SAMPLES, 1) == 40e6
    assert LAYERS.host_bytes(SHAPE, SAMPLES, 3) == 40e6 + 2e9  # two further processes


def test_the_weights_alone_are_the_least() -> None:
    assert WHOLE.least_bytes(SHAPE, 2) == 2e9
    assert LAYERS.least_bytes(SHAPE, 2) == 200e6
    assert SPLIT.least_bytes(SHAPE, 2) == 100e6


def test_the_first_that_fits_is_chosen() -> None:
    ladder = (WHOLE, LAYERS, SPLIT)
    assert choose(ladder, SHAPE, SAMPLES, None, 2) == WHOLE
    assert choose(ladder, SHAPE, SAMPLES, 2_145_000_000, 1) == WHOLE
    assert choose(ladder, SHAPE, SAMPLES, 2_144_999_999, 1) == LAYERS
    assert choose(ladder, SHAPE, SAMPLES, 1_000_000_000, 2) == SPLIT
    assert choose(ladder, SHAPE, SAMPLES, 1_000_000_000, 1) == LAYERS  # a layer is not split with one GPU
    assert choose(ladder, SHAPE, SAMPLES, 1, 2) == SPLIT  # none fits: the last tries


@pytest.mark.parametrize("name", ["GPTQMODEL", "LLM_COMPRESSOR", "AUTOROUND"])
def test_a_7b_fits_into_six_gigabytes(name: str) -> None:
    """By the figures; and every further placement takes less than the one before it."""
    model, samples = of_file("config/examples/llama-2-7b.json"), Samples(128 * 2048, 2048)
    ladder = getattr(placement, name)
    takes = [each.gpu_bytes(model, samples, 2) for each in ladder]
    assert takes == sorted(takes, reverse=True) or name == "AUTOROUND"  # which has two ways to take less
    found = choose(ladder, model, samples, 6 * 10**9, 1)
    assert found.activations == "host" and found.gpu_bytes(model, samples, 1) < 6e9
    assert choose(ladder, model, samples, 140 * 10**9, 1) == ladder[0]


@pytest.fixture(scope="module")
def facts(two_layers: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for env, names in TOOLS.items():
        work = tmp_path_factory.mktemp(env)
        result = call(interpreter(env), REPO / "tests/build/placement_checks.py", two_layers, work, *names)
        assert result.returncode == 0, result.stderr
        found |= json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tool", [tool for tools in TOOLS.values() for tool in tools])
def test_no_placement_changes_the_bytes(facts: dict[str, Any], tool: str) -> None:
    assert len(facts[tool]) > 1 and len(set(facts[tool])) == 1


@pytest.mark.slow
def test_several_processes_save_the_same_each_time(facts: dict[str, Any]) -> None:
    """It differs from one process's: sums of samples are added in another order."""
    assert len({*facts["ranks"]}) == 1
    assert facts["ranks"][0] != facts["llmcompressor"][0]


@pytest.mark.slow
def test_a_process_that_fails_says_why_and_ends_the_others(facts: dict[str, Any]) -> None:
    assert "NOPE" in facts["failed"]


@pytest.mark.slow
def test_a_limit_holds_for_this_process_and_decides(facts: dict[str, Any]) -> None:
    free, asked, little = (facts["gpu"][name] for name in ("free", "asked", "little"))
    assert (free["weights"], free["allowed_bytes"], free["limits"]) == ("gpu", 70e9, [])  # nothing is limited unasked
    assert (asked["weights"], asked["allowed_bytes"], asked["limits"]) == ("gpu", 8e9, [0.1])
    assert (little["allowed_bytes"], little["limits"]) == (5e9, [5 / 80])  # no more than is free
    tight = facts["gpu"]["tight"]
    assert (tight["weights"], tight["activations"], tight["gpus"]) == ("host", "host", 1)
    assert tight["peak_bytes"] == 7 and tight["predicted_bytes"] > 300e6


@pytest.mark.slow
def test_what_does_not_fit_is_one_line(facts: dict[str, Any]) -> None:
    assert "tool holds a layer at a time on the GPU" in facts["gpu"]["none"]
    assert facts["gpu"]["none"].endswith("take a GPU with more free memory, or raise quantizers.gpu_memory_gb")
    memory, other = facts["gpu"]["tight"]["errors"]
    assert memory.startswith("needs more than the 0.3 GB that it may use of a GPU, with a layer at a time on the GPU")
    assert other == ("cannot quantize it with a layer at a time on the GPU, activations on the host (KeyError: 'x')")
    memory, other = facts["gpu"]["free"]["errors"]
    assert memory.endswith("; take a GPU with more free memory")  # no limit was set that could be raised
    assert other == "cannot quantize it (KeyError: 'x')"
    # of a tool without a choice nothing is known: its own words stand
    assert facts["gpu"]["no choice"]["errors"][0] == "cannot quantize it (CUDA out of memory. Tried)"
