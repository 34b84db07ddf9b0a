"""Load of the host from other processes during a measurement, by Linux's counters; unknown on other systems.

The measuring process reads them before its first and after its last measured run, so that reading disturbs no run.
Sources: proc(5), the kernel's cgroup-v2 documentation (cpu.stat), sysfs-devices-system-cpu (thermal_throttle).
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantmill.devices import processes

STAT = Path("/proc/stat")
CGROUPS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))  # versions 2 and 1
CPUS = Path("/sys/devices/system/cpu")
# fields of a line of /proc/stat: user, nice, system, irq, softirq; without idle and iowait
BUSY, STOLEN = (1, 2, 3, 6, 7), 8


@dataclass(frozen=True)
class Load:
    """Load from other processes: shares of the time of all processors that this process may use, and counts of stops.

    `others`: the share of other programs. `stolen`: the share that the hypervisor gave to other machines.
    """

    others: float
    stolen: float
    quota_stops: int
    heat_stops: int


@dataclass(frozen=True)
class Reading:
    """Counters at a moment: seconds, summed over processors, and events."""

    at: float
    busy: float
    stolen: float
    own: float
    quota_stops: int
    heat_stops: int


def read(cpus: frozenset[int], own: Iterable[int] = ()) -> Reading | None:
    """Read the counters of some processors; None without /proc/stat.

    `own`: processes that, with this one and all their descendants, do not count as others.
    """
    if not STAT.exists():
        return None
    lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines()]
    ours = [line for line in lines if line[0][:3] == "cpu" and line[0][3:].isdigit() and int(line[0][3:]) in cpus]
    tick = 1 / os.sysconf("SC_CLK_TCK")
    return Reading(
        at=time.perf_counter(),
        busy=sum(int(line[field]) for line in ours for field in BUSY) * tick,
        stolen=sum(int(line[STOLEN]) for line in ours) * tick,
        own=processes.cpu_seconds(own),
        quota_stops=_quota_stops(),
        heat_stops=sum(_count(CPUS / f"cpu{cpu}/thermal_throttle/core_throttle_count") for cpu in cpus),
    )


def load(before: Reading | None, after: Reading | None, processors: int) -> Load | None:
    """Compute the load from other processes between two readings."""
    if before is None or after is None:
        return None
    available = (after.at - before.at) * processors
    others = after.busy - before.busy - (after.own - before.own)
    return Load(
        others=max(0.0, others / available),  # ticks are coarser than the clock of a process
        stolen=(after.stolen - before.stolen) / available,
        quota_stops=after.quota_stops - before.quota_stops,
        heat_stops=after.heat_stops - before.heat_stops,
    )


def _count(path: Path) -> int:
    return int(path.read_text(encoding="ascii")) if path.exists() else 0


def _quota_stops() -> int:
    """Return the number of times that a CPU quota stopped this container."""
    for path in CGROUPS:
        if path.exists():
            values = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
            return int(values.get("nr_throttled", 0))
    return 0
