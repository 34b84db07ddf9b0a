"""Sizes of a study's texts: bytes, and tokens."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quantmill.plan.jobs import POSITIONS_A_BYTE
from quantmill.tokens.files import Tokens

HUB_TEXTS = {"Salesforce/wikitext": 1_290_590}  # bytes of WikiText-2's test text, the default


def text_bytes(text: str | Mapping[str, Any]) -> int | None:
    """Return the bytes of a text of the config; None for an unknown text of the hub."""
    return HUB_TEXTS.get(text["hub"]) if isinstance(text, Mapping) else Path(text).stat().st_size


def count_tokens(folder: Path, model: Mapping[str, Any], kind: str, left: Collection[str]) -> int | None:
    """Count the tokens of a model's text: those in its file of ids, which is in the model's `folder`, if that is not
    `left` to make, else the most that its bytes can hold. None for an unknown text of the hub."""
    file = folder / f"tokens/{kind}.json"
    if str(file) not in left and file.is_file():
        found = Tokens.read(file)
        return len(found.ids) + sum(len(document.ids) for document in found.documents)
    nbytes = text_bytes(model["texts"][kind])
    return None if nbytes is None else int(nbytes * POSITIONS_A_BYTE)
