"""A model's config.json, as far as it is about text."""

from collections.abc import Mapping
from typing import Any


def of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its keys of the language model, some of which lie in `text_config` where a model reads more than text."""
    inner = config.get("text_config")
    return {**(inner if isinstance(inner, dict) else {}), **config}
