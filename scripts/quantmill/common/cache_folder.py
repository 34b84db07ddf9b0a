"""The user's cache folder, where what is compiled once lies for all checkouts (~/.cache/quantmill)."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache() -> Path:
    """The user's cache folder of Quantmill."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantmill"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One process at a time works in a folder of the cache; its lock goes when the process does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
