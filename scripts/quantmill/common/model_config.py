"""A model's config.json, as far as it is about text."""

from collections.abc import Mapping
from typing import Any

MAX_CONFIG = 4 * 2**20  # bytes of a config.json; those with a name for each of 20,000 classes take 1 MB


def of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its keys of the language model, some of which lie in `text_config` where a model reads more than text."""
    inner = config.get("text_config")
    return {**(inner if isinstance(inner, dict) else {}), **config}


def context_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of a model's context; None where its config.json does not say. GPT-2 and its kin say n_positions."""
    words = of_text(config)
    found = words.get("max_position_embeddings", words.get("n_positions"))
    return found if type(found) is int and found > 0 else None
