"""Check that a study's prompts, new tokens and `memory_at` fit a model's context, which its config.json gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmill.common.model_config import context_of
from quantmill.plan.cells import wants_loads
from quantmill.plan.config_values import ConfigError
from quantmill.plan.model_source import local_config, read_config, source
from quantmill.report.column import limits

SHORTEST = 1  # tokens of a prompt
MEMORY = "memory_at.context"
BUILT = ("source", "safetensors", "fp16")  # folders that have the config of a model of the hub


def asked(study: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a prompt and its continuation, or of a text, by the config's key that sets them."""
    latency, loads = study["latency"], study["loads"]
    found = {"latency.new_tokens": SHORTEST + latency["new_tokens"]}
    if wants_loads(study):
        cut = loads["concurrency"] or loads["rates"] or loads["goodput"]
        prompt = max(limits(loads["prompt_tokens"])) if cut else SHORTEST
        found["loads.new_tokens"] = prompt + max(limits(loads["new_tokens"]))
    if "memory_at" in study:
        found[MEMORY] = study["memory_at"]["context"]
    return found


def most(study: Mapping[str, Any]) -> int:
    """Return the most tokens that a study asks of a model at once."""
    return max(asked(study).values())


def check(name: str, model: Mapping[str, Any], study: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for more tokens than a model's context has. A model of the hub is checked once it is here."""
    config = local_config(model)
    if source(model)[0] == "hub":
        config = next(filter(None, (read_config(Path("artifacts", name, each, "config.json")) for each in BUILT)), {})
    context = context_of(config)
    for key, tokens in asked(study).items():
        if context is not None and tokens > context:
            what = f"is {tokens}" if key == MEMORY else f"a prompt and its new tokens are {tokens} together"
            raise ConfigError(f"{key}: {what}, and the context of {name} is {context}; lower it")
