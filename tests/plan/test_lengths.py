"""A study that asks for more tokens than a context has is refused before its first job, where that can be known."""

import json
from pathlib import Path
from typing import Any

import pytest
from config_registry import check, folders  # noqa: F401

from quantmill.plan.config_values import ConfigError

SERVER = {"runs": {"x": {"engine": "slots", "formats": ["fp16"], "options": {"parallel": 4}}}}


def say(folder: str, **config: Any) -> None:
    """Write a config.json into a model's folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 64}, {"n_positions": 64}, {"text_config": {"max_position_embeddings": 64}}]
)
def test_new_tokens_fit_the_context_with_a_prompt(config: dict[str, Any]) -> None:
    say("demo", **config)
    assert check(latency={"new_tokens": 63})
    with pytest.raises(ConfigError) as refused:
        check(latency={"new_tokens": 64})
    assert str(refused.value) == (
        "latency.new_tokens: a prompt and its new tokens are 65 together, and the context of demo is 64; lower it"
    )


def test_loads_fit_the_context() -> None:
    say("demo", max_position_embeddings=300)
    fits = {"concurrency": [4], "prompt_tokens": [32, 200], "new_tokens": 100}
    assert check(**SERVER, loads=fits)
    message = (
        r"^loads\.new_tokens: a prompt and its new tokens are 301 together, and the context of demo is 300; lower it$"
    )
    for change in ({"prompt_tokens": [32, 201]}, {"new_tokens": 101}, {"new_tokens": [2, 101]}):
        with pytest.raises(ConfigError, match=message):
            check(**SERVER, loads=fits | change)
    with pytest.raises(ConfigError, match="are 301 together"):  # a burst's prompts are the user's, of a token at least
        check(**SERVER, loads={"burst": 2, "new_tokens": 300})
    assert check(loads={"prompt_tokens": 1000, "new_tokens": 1000})  # and nothing is put under loads


def test_memory_is_counted_within_the_context() -> None:
    say("demo", max_position_embeddings=300)
    assert check(memory_at={"context": 300}, latency={"new_tokens": 2})["memory_at"] == {"context": 300, "users": 1}
    with pytest.raises(ConfigError) as refused:
        check(memory_at={"context": 301, "users": 4}, latency={"new_tokens": 2})
    assert str(refused.value) == "memory_at.context: is 301, and the context of demo is 300; lower it"


def test_random_weights_have_a_context_too() -> None:
    say("bare", max_position_embeddings=128)
    with pytest.raises(ConfigError, match=r"latency\.new_tokens: .* 201 together, and the context of r is 128"):
        check(models={"r": {"source": {"random": "bare"}, "formats": ["ct2-int8"]}})


def test_a_hub_model_is_checked_once_it_is_here() -> None:
    models = {"h": {"source": {"hub": "x/y"}}}
    assert check(models=models)
    say("artifacts/h/safetensors", max_position_embeddings=128)
    with pytest.raises(ConfigError, match=r"latency\.new_tokens: .* 201 together, and the context of h is 128"):
        check(models=models)


@pytest.mark.parametrize("context", [None, "64", True, -1, 10**9])
def test_a_context_that_nothing_is_known_of_refuses_nothing(context: Any) -> None:
    say("demo", max_position_embeddings=context)
    assert check()
