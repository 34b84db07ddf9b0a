"""GPUs for one job alone: of several, the first that no other job holds, by locks on this host.

Two measurements on one card would both be wrong. Snakemake's resource `gpu` counts jobs of one workflow; it knows
neither which card a job takes nor what another workflow does.
"""

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import IO

from quantmill.common.program import UserError

FOLDER = Path("/tmp")  # not TMPDIR, which may be another for each user
HELD = "QUANTMILL_CARD"  # a job's processes share its card
POLL_SECONDS = 0.5

_locks: list[IO[str]] = []  # kept open, and so held, until the process ends


def hold(count: int = 1) -> None:
    """Wait for `count` free cards of those visible; this process and those that it starts will see these alone.

    To be called before anything initialises CUDA. Does nothing where NVML finds no card; where the process that started
    this one holds as many already, they are the first of its. Raises `UserError` where fewer are visible. No job waits
    while it holds some of its cards, so that no two wait for one another; who asks for many waits until so many are
    free at once.
    """
    visible = visible_cards()
    held = os.environ.get(HELD, "").split(",")
    if not visible:
        return
    if set(held) <= set(visible) and len(held) >= count:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[HELD] = ",".join(held[:count])
        return
    if count > len(visible):
        raise UserError(f"{count} GPUs are asked for, and {len(visible)} are there ({', '.join(visible)}); lower gpus")
    waiting = False
    while not (taken := _try_locks(visible, count)):
        if not waiting:
            reason = "every GPU is held by another job" if count == 1 else f"fewer than {count} GPUs are free"
            print(f"{reason} ({', '.join(visible)}); waiting for {'one' if count == 1 else count}", file=sys.stderr)
        waiting = True
        time.sleep(POLL_SECONDS)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[HELD] = ",".join(card for card in visible if card in taken)


def _try_locks(visible: list[str], count: int) -> list[str]:
    """Lock the first `count` cards that are free; none where there are not so many.

    Of several jobs that try at once one gets all that it asks for: each takes cards by the order of their names, and
    gives up as soon as those that are left are too few.
    """
    taken: list[str] = []
    order = sorted(visible) if count > 1 else visible
    for place, card in enumerate(order):
        if len(taken) + len(order) - place < count:
            break
        lock = try_lock(FOLDER / f"quantmill-{card}.lock")
        if lock is not None:
            _locks.append(lock)
            taken.append(card)
        if len(taken) == count:
            return taken
    while _locks:
        _locks.pop().close()
    return []


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
    count, named = pynvml.nvmlDeviceGetCount(), os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = []
    for name in map(str, range(count)) if named is None else map(str.strip, named.split(",")):
        if name.isdecimal() and int(name) < count:
            uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
            cards.append(uuid.decode() if isinstance(uuid, bytes) else uuid)
        elif name.startswith(("GPU-", "MIG-")):  # its UUID, or that of a slice of it
            cards.append(name)
        else:
            break  # as for CUDA: after a name that no card has, none is visible
    return cards


def try_lock(path: Path) -> IO[str] | None:
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
