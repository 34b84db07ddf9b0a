"""One GPU for one job: of several, the first that no other job holds, by a lock on this host.

Two measurements on one card would both be wrong. Snakemake's resource `gpu` counts jobs of one workflow; it knows
neither which card a job takes nor what another workflow does.
"""

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

FOLDER = Path("/tmp")  # not TMPDIR, which may be another for each user
HELD = "QUANTMILL_CARD"  # a job's processes share its card
POLL_SECONDS = 0.5

_lock: IO[str] | None = None  # kept open, and so held, until the process ends


def hold() -> None:
    """Wait for a free card of those visible; this process and those that it starts will see that one alone.

    To be called before anything initialises CUDA. Does nothing where NVML finds no card, and where the process that
    started this one holds a card already.
    """
    global _lock
    visible = visible_cards()
    if not visible or os.environ.get(HELD) in visible:
        return
    waiting = False
    while True:
        for card in visible:
            _lock = _try_lock(FOLDER / f"quantmill-{card}.lock")
            if _lock is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[HELD] = card
                return
        if not waiting:
            print(f"every GPU is held by another job ({', '.join(visible)}); waiting for one", file=sys.stderr)
        waiting = True
        time.sleep(POLL_SECONDS)


def visible_cards() -> list[str]:
    """UUIDs of the cards that CUDA_VISIBLE_DEVICES names, of all where it is not set; none where NVML is not there."""
    try:
        import pynvml  # only in environments that use a GPU
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(pynvml.nvmlDeviceGetCount())] if named is None else named.split(",")
    return [_uuid(pynvml, name.strip()) for name in names if name.strip()]


def _uuid(nvml: Any, name: str) -> str:
    """Of a card by its number or, as CUDA allows, by its UUID or that of a slice of it."""
    if not name.isdecimal():
        return name
    uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(name)))
    return uuid.decode() if isinstance(uuid, bytes) else uuid


def _try_lock(path: Path) -> IO[str] | None:
    """The locked file, or None where another process holds it."""
    # whoever comes first makes it, for all: a folder that all may write lets nobody else open it with O_CREAT
    try:
        file = path.open("r+")
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)
        file = os.fdopen(descriptor, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
