"""Licence of a published artifact: that of the weights that it was made from."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from quantmill.checkpoint.selection import is_carried
from quantmill.common.program import UserError

README = "README.md"
MAX_BYTES = 2**20  # of a model card
KEYS = ("license", "license_name", "license_link")  # of a card's metadata
TEXTS = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY")  # files that go wherever the weights go
SAY = "if you may publish it, set publish: {license: ID}"


def find(source: Path, said: str | None) -> dict[str, str]:
    """Return the licence as a card's metadata.

    Args:
        source: the folder of the checkpoint as its author published it.
        said: the licence that the study names instead.

    Raises:
        UserError: the source names no licence, or one that forbids derivatives.
    """
    if said:
        return {"license": said}
    named = {key: text for key, text in metadata(source).items() if key in KEYS and isinstance(text, str) and text}
    licence = named.get("license", "unknown").lower()
    if licence == "unknown" or (licence == "other" and "license_name" not in named):
        raise UserError(f"{source}: its {README} names no licence, so its artifacts cannot be published; {SAY}")
    if "nd" in re.split(r"[^a-z0-9]+", f"{licence} {named.get('license_name', '').lower()}"):
        raise UserError(f"{source}: its licence, {licence}, forbids derivatives; {SAY}")
    return named


def metadata(source: Path) -> dict[str, Any]:
    """Read the head of the source's model card; empty if there is none, or it is damaged."""
    card = source / README
    if not card.is_file() or card.stat().st_size > MAX_BYTES:
        return {}
    try:
        return metadata_load(card) or {}
    except Exception:  # a stranger's YAML raises anything
        return {}


def texts(source: Path) -> dict[str, Path]:
    """Return the files of a checkpoint that hold its terms, by name."""
    terms = (path for path in sorted(source.iterdir()) if path.name.startswith(TEXTS) and is_carried(path.name))
    return {path.name: path for path in terms if path.is_file()}
