"""Under which licence an artifact may be published: that of the weights that it was made from."""

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
SAY = "where you may publish it, say so: publish: {license: ID}"


def find(source: Path, said: str | None) -> dict[str, str]:
    """The licence as a card's metadata.

    Args:
        source: the folder of the checkpoint as its author published it.
        said: what the study says instead.

    Raises:
        UserError: the source names none, or one that forbids to publish what was made of it.
    """
    if said:
        return {"license": said}
    named = {key: text for key, text in metadata(source).items() if key in KEYS and isinstance(text, str) and text}
    licence = named.get("license", "unknown").lower()
    if licence == "unknown" or (licence == "other" and "license_name" not in named):
        raise UserError(f"{source}: its {README} names no licence, so nothing made of it may be published; {SAY}")
    if "nd" in re.split(r"[^a-z0-9]+", f"{licence} {named.get('license_name', '').lower()}"):
        raise UserError(f"{source}: its licence, {licence}, forbids to publish what is made of it; {SAY}")
    return named


def metadata(source: Path) -> dict[str, Any]:
    """What the head of the source's model card says; nothing where there is none, or it is damaged."""
    card = source / README
    if not card.is_file() or card.stat().st_size > MAX_BYTES:
        return {}
    try:
        return metadata_load(card) or {}
    except Exception:  # of a stranger's YAML
        return {}


def texts(source: Path) -> dict[str, Path]:
    """The files of a checkpoint that hold its terms, by name."""
    terms = (path for path in sorted(source.iterdir()) if path.name.startswith(TEXTS) and is_carried(path.name))
    return {path.name: path for path in terms if path.is_file()}
