"""Special tokens' ids, as configs name them."""

from collections.abc import Mapping
from typing import Any

from quantmill.common.model_config import of_text


def ends(config: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a sequence, by a model's config.json."""
    words = of_text(config)
    return select(words.get("eos_token_id"), words.get("vocab_size"))


def select(value: Any, vocab_size: Any) -> list[int]:
    """Return the valid ids of a config's `bos_token_id`, `eos_token_id` or similar: one id or a list of them.

    Other values are dropped: null, text, booleans, negative numbers, and ids beyond a truncated vocabulary, which no
    engine chooses and no embedding table holds. If `vocab_size` is not a number, all are dropped.
    """
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if type(token) is int and type(vocab_size) is int and 0 <= token < vocab_size]
