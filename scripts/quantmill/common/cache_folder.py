"""The user's cache folder (~/.cache/quantmill), which all checkouts share for compiled files."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache() -> Path:
    """Return the user's cache folder of Quantmill."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantmill"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in the cache; the kernel frees it when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
