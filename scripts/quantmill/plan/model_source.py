"""A model's source in the config, and its config.json if that is local."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmill.common import bounded_json, plain_file
from quantmill.common.model_config import MAX_CONFIG
from quantmill.common.program import PACKAGE, UserError

# This checkout, relative to the working directory: `.`, unless another workflow uses this one as a module
CHECKOUT = Path(os.path.relpath(PACKAGE.parents[1]))


def source(model: Mapping[str, Any]) -> tuple[str, Path]:
    """Kind (`demo`, `path`, `random`, `hub`) and path of a model's source; for `hub`, the repository's name."""
    if model["source"] == "demo":
        return "demo", CHECKOUT / "demo"
    kind = next(kind for kind in ("path", "random", "hub") if kind in model["source"])
    return kind, Path(model["source"][kind])


def local_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config.json; empty for a model of the hub and for a damaged file, which a job will report."""
    kind, path = source(model)
    return {} if kind == "hub" else read_config(path / "config.json" if path.is_dir() else path)


def read_config(file: Path) -> dict[str, Any]:
    """Read a config.json, its `text_config` if it has one; empty if the file is missing or damaged."""
    try:
        found = bounded_json.loads(plain_file.read(file, MAX_CONFIG), MAX_CONFIG)
        found = found.get("text_config") or found
    except (UserError, OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}
