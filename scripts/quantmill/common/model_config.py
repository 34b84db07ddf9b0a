"""The part of a model's config.json that describes the language model."""

from collections.abc import Mapping
from typing import Any

MAX_CONFIG = 4 * 2**20  # bytes of a config.json; one with names of 20,000 classes has 1 MB


def of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's keys; multimodal models keep some of them in `text_config`."""
    inner = config.get("text_config")
    return {**(inner if isinstance(inner, dict) else {}), **config}


def context_of(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of a model's context, or None if its config.json has none. GPT-2 calls it n_positions."""
    words = of_text(config)
    found = words.get("max_position_embeddings", words.get("n_positions"))
    return found if type(found) is int and found > 0 else None
