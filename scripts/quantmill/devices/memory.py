"""Memory that this process may still take: the machine's, its control group's and its own limit's.

Sources: proc(5), getrlimit(2), the kernel's cgroup-v2 documentation (memory.max, memory.stat).
"""

import resource
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the bytes of memory that this process may still take on the host."""
    machine = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(Path("/proc/meminfo"))}
    free = [machine["MemAvailable"]]
    own = {line.split(":")[0]: line.split() for line in _lines(Path("/proc/self/status"))}
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        if (most := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            free.append(most - int(own[used][1]) * 1024)
    if (left := _group_bytes()) is not None:
        free.append(left)
    return max(0, min(free))


def _group_bytes() -> int | None:
    """Return what the control group (version 2) leaves, None without a limit. Pages of files can be taken back."""
    entry = next((line for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), None)
    folder = GROUP / (entry or "0::/")[3:].lstrip("/")
    left: list[int] = []
    for each in (folder, *folder.parents):
        if not each.is_relative_to(GROUP) or not (each / "memory.max").is_file():
            continue
        most = (each / "memory.max").read_text().strip()
        if most != "max":
            stat = dict(line.split() for line in _lines(each / "memory.stat"))
            used = int((each / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            left.append(int(most) - used)
    return min(left, default=None)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
