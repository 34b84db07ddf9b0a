"""Token ids as configs name them."""

from collections.abc import Mapping
from typing import Any

from quantmill.common.model_config import of_text


def ends(config: Mapping[str, Any]) -> list[int]:
    """The ids that end a sequence, by a model's config.json."""
    words = of_text(config)
    return select(words.get("eos_token_id"), words.get("vocab_size"))


def select(value: Any, vocab_size: Any) -> list[int]:
    """Of a config's `bos_token_id`, `eos_token_id` and the like, one id or a list of them, those that a vocabulary has.

    What is none is left out: null, text, a boolean, a negative number, or an id beyond a vocabulary that was cut, which
    no engine chooses and no embedding table holds. Of a vocabulary whose size is no number, none is known to be there.
    """
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if type(token) is int and type(vocab_size) is int and 0 <= token < vocab_size]
