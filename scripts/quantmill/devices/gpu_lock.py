"""Reserve GPUs for one job, by locks on this host: the first of those visible that no other job holds.

Two measurements on one GPU would both be wrong. Snakemake's resource `gpu` counts the jobs of one workflow; it knows
neither the GPU that a job takes nor other workflows.
"""

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import IO

from quantmill.common.program import UserError

FOLDER = Path("/tmp")  # not TMPDIR, which may differ between users
HELD = "QUANTMILL_CARD"  # a job's processes share its GPUs
POLL_SECONDS = 0.5

_locks: list[IO[str]] = []  # open, and so held, until the process ends


def hold(count: int = 1) -> None:
    """Wait for `count` free GPUs among those visible, and make them the only visible ones, also for child processes.

    To be called before CUDA is initialised. If NVML finds no GPU, nothing happens. If the parent process holds at least
    `count` GPUs, its first ones are used. No job waits while it holds some of its GPUs, so there is no deadlock; a job
    of several GPUs waits until enough are free at once.

    Raises:
        UserError: if fewer than `count` GPUs are visible.
    """
    visible = visible_cards()
    held = os.environ.get(HELD, "").split(",")
    if not visible:
        return
    if set(held) <= set(visible) and len(held) >= count:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[HELD] = ",".join(held[:count])
        return
    if count > len(visible):
        raise UserError(f"gpus is {count}, but {len(visible)} are visible ({', '.join(visible)}); lower gpus")
    waiting = False
    while not (taken := _try_locks(visible, count)):
        if not waiting:
            reason = "every GPU is held by another job" if count == 1 else f"fewer than {count} GPUs are free"
            print(f"{reason} ({', '.join(visible)}); waiting for {'one' if count == 1 else count}", file=sys.stderr)
        waiting = True
        time.sleep(POLL_SECONDS)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[HELD] = ",".join(card for card in visible if card in taken)


def _try_locks(visible: list[str], count: int) -> list[str]:
    """Lock the first `count` free GPUs; return none if fewer are free.

    If several jobs try at once, one succeeds: each locks GPUs in the order of their names, and gives up as soon as too
    few are left.
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
    """Return the UUIDs of the GPUs in CUDA_VISIBLE_DEVICES, or of all if it is unset; none without NVML."""
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
            break  # as in CUDA: after an unknown name, none is visible
    return cards


def try_lock(path: Path) -> IO[str] | None:
    """Lock a file, and return it open; None if another process holds the lock."""
    # O_CREAT on another user's file in a sticky folder such as /tmp fails, so an existing file is opened without it
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
