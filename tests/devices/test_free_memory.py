"""Memory that a process may still take: the smallest of what the machine and each limit leave."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from quantmill.devices import memory

STATUS = "VmSize:\t 500 kB\nVmData:\t 100 kB\n"
VERSION_2 = {
    "self/cgroup": "0::/jobs/one\n",
    "groups/jobs/memory.max": "900000\n",
    "groups/jobs/memory.current": "500000\n",
    "groups/jobs/memory.stat": "anon 1\ninactive_file 100000\n",
    "groups/jobs/one/memory.max": "max\n",
}
VERSION_1 = {
    "self/cgroup": "10:cpu:/other\n4:memory:/box/of/a/container\n0::/\n",
    "groups/memory/memory.limit_in_bytes": "700000\n",  # a container sees its own group as the root
    "groups/memory/memory.usage_in_bytes": "300000\n",
    "groups/memory/memory.stat": "total_inactive_file 50000\n",
}


@pytest.mark.parametrize(
    ("files", "left"), [({}, 2_048_000), (VERSION_2, 500_000), (VERSION_1, 450_000)], ids=["none", "2", "1"]
)
def test_control_groups_limit_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], left: int
) -> None:
    for name, text in ({"meminfo": "MemAvailable: 2000 kB\n", "self/status": STATUS} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    assert memory.available_bytes() == left


@pytest.mark.parametrize("kind", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_a_limit_of_the_process_counts(kind: str) -> None:
    def limit() -> None:
        resource.setrlimit(getattr(resource, kind), (2**30, 2**30))

    program = "from quantmill.devices import memory; print(memory.available_bytes())"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO / "scripts", capture_output=True, text=True, preexec_fn=limit
    )
    assert 0.5 * 2**30 < int(told.stdout) < 2**30
