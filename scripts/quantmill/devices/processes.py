"""Descendants, time and memory of processes on Linux; on other systems, of this process alone."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from quantmill.common import manifest

PROC = Path("/proc")
# fields of /proc/PID/stat after the name; times, of itself and of ended children, and start since boot, in ticks
PARENT, GROUP, SESSION, TERMINAL, TIMES, BEGAN = 1, 2, 3, 4, slice(11, 15), 19


def tree(pids: Iterable[int]) -> set[int]:
    """Return the processes and all their descendants that still run."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        if fields := stat(int(folder.name)):
            children.setdefault(int(fields[PARENT]), []).append(int(folder.name))
    found, waiting = set(), list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds, since their start, of this process, of `pids`, and of all their descendants."""
    mine = os.getpid()
    ended = os.times()
    ticks = sum(sum(map(int, fields[TIMES])) for pid in tree({mine, *pids}) - {mine} if (fields := stat(pid)))
    return time.process_time() + ended.children_user + ended.children_system + ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes(pids: Iterable[int]) -> int | None:
    """Return the summed peak resident memory of processes plus the current memory of their descendants.

    Pages that several descendants map count once (Pss), because forked workers share nearly all of theirs. None if no
    process runs here.
    """
    own = set(pids)
    found = [_peak(pid) for pid in own]
    found += [_field(pid, "smaps_rollup", "Pss:") for pid in tree(own) - own]
    known = [each for each in found if each is not None]
    return sum(known) if known else None


def began(pid: int) -> int | None:
    """Return a process's start in ticks since boot, which identifies it with its pid; None if it has ended."""
    fields = stat(pid)
    return int(fields[BEGAN]) if fields and fields[0] != "Z" else None


def _peak(pid: int) -> int | None:
    return manifest.peak_rss_bytes() if pid == os.getpid() else _field(pid, "status", "VmHWM:")


def _field(pid: int, file: str, name: str) -> int | None:
    """Return a value in kB of a file of /proc/PID, in bytes; None if the process has ended, or without /proc."""
    try:
        lines = (PROC / str(pid) / file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain anything; None if it has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
