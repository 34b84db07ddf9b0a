"""The loss by a KV cache of few bits is in the measured quality: scores go through the cache."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_cache_of_few_bits_costs_quality(run_gguf: Callable, build_gguf: Callable, gguf_model: Path) -> None:
    result = run_gguf("tests/engines/kv_cache_checks.py", build_gguf("f16"), gguf_model / "evaluation.json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    means = {kind: sum(halves) / 2 for kind, halves in found["halves"].items()}
    assert means["f16"] < 1e-6 < means["q8_0"] < means["q4_0"] / 50
    assert means["q4_0"] > 1e-3
    # a prompt that is read in pieces of 32 finds what the pieces before it left; one that is read at once does too
    assert found["pieces_f32"] < 1e-6
    assert found["pieces_q4_0"] < means["q4_0"] / 10
