"""Processes as Linux counts them: children, time and memory. On other systems a program knows itself alone."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from common import manifest

PROC = Path("/proc")
PARENT, TIMES = (
    1,
    slice(11, 15),
)  # fields of /proc/PID/stat after the name: own time and that of ended children, in ticks


def tree(pids: Iterable[int]) -> set[int]:
    """The processes and all that they started, directly or not, and that still run."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        if stat := _stat(int(folder.name)):
            children.setdefault(int(stat[PARENT]), []).append(int(folder.name))
    found, waiting = set(), list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of this process and of those, with all that they started, up to now. Since they began: to be
    subtracted from a later answer."""
    mine = os.getpid()
    ended = os.times()
    ticks = sum(sum(map(int, stat[TIMES])) for pid in tree({mine, *pids}) - {mine} if (stat := _stat(pid)))
    return time.process_time() + ended.children_user + ended.children_system + ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes(pids: Iterable[int]) -> int | None:
    """Most resident memory of each process, and what all that they started holds now, added up; None where none of them
    runs here.

    Of what was started, pages that several processes map count once: forked workers share nearly all of theirs.
    """
    own = set(pids)
    found = [_peak(pid) for pid in own]
    found += [_field(pid, "smaps_rollup", "Pss:") for pid in tree(own) - own]
    known = [each for each in found if each is not None]
    return sum(known) if known else None


def _peak(pid: int) -> int | None:
    return manifest.peak_rss_bytes() if pid == os.getpid() else _field(pid, "status", "VmHWM:")


def _field(pid: int, file: str, name: str) -> int | None:
    """Bytes that a file of /proc/PID tells in kB; None where the process has ended, or this is no Linux."""
    try:
        lines = (PROC / str(pid) / file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: before it stands a name, which may hold anything."""
    try:
        return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
