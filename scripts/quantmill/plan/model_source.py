"""Where a model of the config comes from, and what its config.json says where it is here."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmill.common import bounded_json, plain_file
from quantmill.common.model_config import MAX_CONFIG
from quantmill.common.program import PACKAGE, UserError

# This checkout, as the working directory sees it: `.` but where another workflow uses this one as a module
CHECKOUT = Path(os.path.relpath(PACKAGE.parents[1]))


def source(model: Mapping[str, Any]) -> tuple[str, Path]:
    """Kind (`demo`, `path`, `random`, `hub`) and path of a model's source; of the hub's, the repository's name."""
    if model["source"] == "demo":
        return "demo", CHECKOUT / "demo"
    kind = next(kind for kind in ("path", "random", "hub") if kind in model["source"])
    return kind, Path(model["source"][kind])


def local_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config.json; empty where it is the hub's or damaged: the job that reads it says so."""
    kind, path = source(model)
    return {} if kind == "hub" else read_config(path / "config.json" if path.is_dir() else path)


def read_config(file: Path) -> dict[str, Any]:
    """What a config.json says, of its text model where it has several; empty where there is none, or it is damaged."""
    try:
        found = bounded_json.loads(plain_file.read(file, MAX_CONFIG), MAX_CONFIG)
        found = found.get("text_config") or found
    except (UserError, OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}
