"""Memory that this process may still take: the machine's, its control group's and its own limit's.

Sources: proc(5), getrlimit(2), and the kernel's documentation of control groups, versions 1 and 2 (memory.stat).
"""

import resource
from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# By the controller in /proc/self/cgroup, none in version 2: its folder, and the files of the limit and of the use, and
# what of the use the kernel can take back, since it is pages of files
KINDS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes() -> int:
    """Return the bytes of memory that this process may still take on the host."""
    machine = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(PROC / "meminfo")}
    free = [machine["MemAvailable"]]
    own = {line.split(":")[0]: line.split() for line in _lines(PROC / "self/status")}
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        if (most := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            free.append(most - int(own[used][1]) * 1024)
    return max(0, min([*free, *_left_of_groups()]))


def _left_of_groups() -> Iterator[int]:
    """Yield what each control group that this process is in leaves of its limit."""
    for line in _lines(PROC / "self/cgroup"):
        _, controllers, name = line.split(":", 2)
        for kind in KINDS.keys() & controllers.split(","):
            yield from _left(*KINDS[kind], name.lstrip("/"))


def _left(controller: str, limit: str, use: str, reclaimable: str, name: str) -> Iterator[int]:
    root = GROUPS / controller
    for each in (root / name, *(root / name).parents):
        if each.is_relative_to(root) and (most := _lines(each / limit)) not in ([], ["max"]):
            stat = dict(line.split() for line in _lines(each / "memory.stat"))
            yield int(most[0]) - int(_lines(each / use)[0]) + int(stat.get(reclaimable, 0))


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
