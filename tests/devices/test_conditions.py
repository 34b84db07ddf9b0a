"""Conditions of measurements, from known counters. NVML is a stand-in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmill.devices import conditions, cpu, cuda, host_load, monitor, processes
from quantmill.devices.conditions import Sample
from quantmill.devices.gpu_state import Gpus
from quantmill.devices.host_load import Load, Reading
from quantmill.devices.host_state import Host

pytestmark = pytest.mark.timing
QUIET = Load(others=0.01, stolen=0.0, quota_stops=0, heat_stops=0)


class Nvml:
    """pynvml with one board: 300 W, a counter of millijoules, and whatever a test changes; it knows no temperature."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, nvmlMemory_v2 = 1, 2, 0, 0x2000028

    class NVMLError(Exception):
        """The error that pynvml raises for everything."""

    def __init__(self) -> None:
        self.throttling, self.pids, self.used, self.counts_energy = 0x4, [], 2**20, True
        self.watts = {"handle": 300, "second": 100}
        self.started = time.perf_counter()

    def _board(self, handle: str, value: Any) -> Any:
        assert handle in self.watts
        return value

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.counts_energy:
            raise self.NVMLError
        return self._board(handle, int(1000 * self.watts[handle] * (time.perf_counter() - self.started)))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._board(handle, 1000 * self.watts[handle])

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self._board(handle, {1: 1980 if handle == "handle" else 1500, 2: 3201}[kind])

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        raise self.NVMLError

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self._board(handle, self.throttling)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        pids = self.pids[handle] if isinstance(self.pids, dict) else self.pids
        return self._board(handle, [SimpleNamespace(pid=pid) for pid in pids])

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 0) -> SimpleNamespace:
        if version:
            raise self.NVMLError  # an older driver
        return self._board(handle, SimpleNamespace(used=self.used))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    nvml = Nvml()
    monkeypatch.setattr(cuda, "nvml_devices", lambda: (nvml, ["handle"]))
    monkeypatch.setattr(monitor, "PERIOD", 0.02)
    return nvml


def watch(nvml: Nvml, seconds: float = 0.5, meanwhile: Any = None, own: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the conditions of a process whose decoding filled the middle of the given seconds."""
    with monitor.Monitor("cuda") as each:
        start = time.perf_counter()
        nvml.pids = [12345] if meanwhile is None else meanwhile
        time.sleep(seconds)
        end = time.perf_counter()
        nvml.pids = []
    phases = [(start + seconds / 4, start + seconds / 2), (start + seconds / 2, start + seconds * 3 / 4)]
    return each.describe(None, (start, end), phases, own)


@pytest.mark.parametrize(("counter", "source"), [(True, "energy counter"), (False, "power samples")])
def test_energy_of_the_decode_phases(nvml: Nvml, counter: bool, source: str) -> None:
    nvml.counts_energy = counter
    found = watch(nvml)
    assert found["conditions"]["decode_joules"] == pytest.approx(300 * 0.25, rel=0.05)
    assert found["conditions"]["energy_from"] == source
    device = found["conditions"]["device"]
    assert device["clock_mhz"] == {"min": 1980, "median": 1980, "max": 1980}
    assert device["memory_clock_mhz"]["median"] == 3201
    assert device["watts"]["max"] == 300
    assert "celsius" not in device


def test_a_short_measurement_has_no_energy(nvml: Nvml) -> None:
    assert watch(nvml, seconds=0.06)["conditions"]["decode_joules"] is None


def test_an_own_gpu_at_its_power_cap_is_clean(nvml: Nvml) -> None:
    found = watch(nvml)
    assert found["interference"] == []
    assert found["conditions"]["device"]["throttling"] == {"power cap": 1.0}


def test_throttling_for_heat_marks(nvml: Nvml) -> None:
    nvml.throttling = 0x4 | 0x40
    (reason,) = watch(nvml)["interference"]
    assert reason.startswith("the GPU held its clocks back: hardware thermal slowdown in ")


def test_another_process_beside_ours_marks(nvml: Nvml) -> None:
    assert watch(nvml, meanwhile=[12345, 0])["interference"] == ["1 other process on the GPU meanwhile"]
    # this process watches, and computes nothing
    assert watch(nvml, meanwhile=[12345, os.getpid()])["interference"] == []


def test_cards_that_work_together_are_one_device(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvml_devices", lambda: (nvml, ["handle", "second"]))
    nvml.used = 200 * 2**20  # of each, which is less than a context
    found = watch(nvml, meanwhile={"handle": [1, 2], "second": [2, 3]}, own=(1, 2, 3, 99))
    assert found["conditions"]["decode_joules"] == pytest.approx(400 * 0.25, rel=0.05)
    device = found["conditions"]["device"]
    assert device["watts"]["median"] == 400
    assert device["used_bytes"]["median"] == 400 * 2**20
    assert device["clock_mhz"]["max"] == 1500  # the slowest keeps the others waiting
    assert found["interference"] == []
    found = watch(nvml, meanwhile={"handle": [1, 2], "second": [2, 7]}, own=(1, 2, 3))
    assert found["interference"] == ["1 other process on the GPU meanwhile"]
    # none of ours among them: a container counts by other numbers, and one on each card is ours
    assert watch(nvml, meanwhile={"handle": [5], "second": [6]}, own=(1, 2))["interference"] == []
    assert watch(nvml, meanwhile={"handle": [5], "second": [6, 7]}, own=(1, 2))["interference"] != []


def test_a_process_that_was_there_before_marks(nvml: Nvml) -> None:
    nvml.pids = [7, 8]
    assert watch(nvml)["interference"] == ["2 other processes on the GPU before it started"]


def test_memory_that_nobody_shown_holds_marks(nvml: Nvml) -> None:
    nvml.used = 3 * 10**9  # in a container the processes of others are not listed
    assert watch(nvml, meanwhile=[])["interference"] == [
        "another program held 3 GB of the GPU's memory before it started"
    ]


def test_a_monitor_without_processes_reports_nothing(nvml: Nvml) -> None:
    def refuse(handle: str) -> None:
        raise Nvml.NVMLError

    nvml.nvmlDeviceGetComputeRunningProcesses = refuse
    assert Gpus(nvml, ["handle"]).company() == []
    assert watch(nvml)["interference"] == []


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"others": 0.049}, []),
        ({"others": 0.12}, ["other programs took 12% of the processors' time"]),
        ({"others": 0, "stolen": 0.07}, ["the hypervisor took 7% of the processors' time"]),
        ({"others": 0.04, "stolen": 0.03}, ["other programs took 4% and the hypervisor 3% of the processors' time"]),
        ({"quota_stops": 3}, ["the container's CPU quota stopped it 3 times"]),
        ({"heat_stops": 1}, ["the processor slowed down for heat"]),
    ],
)
def test_what_the_host_did_in_words(changes: dict[str, Any], reasons: list[str]) -> None:
    load = Load(**({"others": 0.01, "stolen": 0.0, "quota_stops": 0, "heat_stops": 0} | changes))
    assert conditions.interference(load, []) == reasons


def test_beside_a_gpu_processors_may_be_busy() -> None:
    assert conditions.interference(Load(0.4, 0.09, 0, 0), [], most=conditions.OTHERS_BESIDE_GPU) == []
    assert conditions.interference(Load(0.4, 0.11, 0, 0), [], most=conditions.OTHERS_BESIDE_GPU) == [
        "other programs took 40% and the hypervisor 11% of the processors' time"
    ]


def test_shares_are_of_the_time_of_all_processors() -> None:
    before = Reading(at=100.0, busy=50.0, stolen=1.0, own=2.0, quota_stops=4, heat_stops=0)
    after = Reading(at=110.0, busy=62.0, stolen=2.0, own=9.0, quota_stops=4, heat_stops=5)
    # 10 s of 4 processors: 12 s busy, of which 7 s are ours
    assert host_load.load(before, after, 4) == Load(others=5 / 40, stolen=1 / 40, quota_stops=0, heat_stops=5)
    assert host_load.load(None, None, 4) is None


LINUX = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="other systems than Linux do not tell")
SPIN = [sys.executable, "-c", "while True: pass"]


def spin(pid: int, seconds: float) -> None:
    """Wait until a process has used so much processor time, however busy this machine is."""
    while processes.cpu_seconds([pid]) - processes.cpu_seconds([]) < seconds:
        time.sleep(0.02)


@LINUX
def test_ones_own_threads_and_processes_are_no_others() -> None:
    before, spun = host_load.read(cpu.processors()), time.process_time()
    while time.process_time() < spun + 0.3:
        pass
    with subprocess.Popen(SPIN) as child:
        while (used := processes.cpu_seconds([])) < before.own + 0.6:  # it is found as a child of ours
            time.sleep(0.02)
        child.kill()
    after = host_load.read(cpu.processors())
    assert after.own >= used - 0.05  # what a child took that has ended stays ours
    assert host_load.load(before, after, 1).others * (after.at - before.at) <= after.busy - before.busy - 0.5


@LINUX
def test_other_programs_are_seen_unless_named() -> None:
    detached = subprocess.run(["sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", *SPIN], stdout=subprocess.PIPE)
    pid = int(detached.stdout)
    try:
        before, named = (host_load.read(cpu.processors(), own) for own in ([], [pid]))
        spin(pid, processes.cpu_seconds([pid]) - processes.cpu_seconds([]) + 0.5)
        after, later = (host_load.read(cpu.processors(), own) for own in ([], [pid]))
    finally:
        os.kill(pid, signal.SIGKILL)
    others = (after.busy - before.busy) - (after.own - before.own)
    assert others > 0.4
    assert (later.own - named.own) - (after.own - before.own) > 0.4


@LINUX
def test_memory_includes_descendants() -> None:
    code = (
        "import subprocess, sys; kept = bytearray(b'x') * 60_000_000; "
        "child = subprocess.Popen([sys.executable, '-c', \"kept = bytearray(b'x') * 90_000_000; print(1, flush=True); "
        'input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE); child.stdout.readline(); '
        "print(child.pid, flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        child = int(process.stdout.readline())
        found, alone = processes.peak_rss_bytes([process.pid]), processes.peak_rss_bytes([child])
        assert processes.tree([process.pid]) == {process.pid, child}
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert 90e6 < alone < 130e6
    assert 150e6 < found < 220e6
    assert processes.peak_rss_bytes([]) is None


@LINUX
def test_pages_that_forked_workers_share_count_once() -> None:
    code = (
        "import os, sys; kept = bytearray(b'x') * 100_000_000; workers = [os.fork() for _ in range(1)]\n"
        "if workers[0]: os.fork() and os.fork()\n"
        "print(1, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        for _ in range(4):
            process.stdout.readline()
        assert len(processes.tree([process.pid])) == 4
        found = processes.peak_rss_bytes([process.pid])
        process.stdin.close()
    assert 100e6 < found < 230e6  # its own 100 MB, and its workers' shares: three quarters of them again


def test_energy_survives_a_counters_overflow(tmp_path: Path) -> None:
    package = tmp_path / "intel-rapl:0"
    for folder, name in (
        (package, "package-0"),
        (tmp_path / "intel-rapl:0:0", "core"),
        (tmp_path / "intel-rapl:1", "psys"),
    ):
        folder.mkdir()
        (folder / "name").write_text(name)
        (folder / "max_energy_range_uj").write_text("1000000")
        (folder / "energy_uj").write_text("900000")
    clock = tmp_path / f"cpu{min(cpu.processors())}/cpufreq/scaling_cur_freq"
    clock.parent.mkdir(parents=True)
    clock.write_text("2400000\n")
    host = Host(powercap=tmp_path, cpufreq=tmp_path)
    assert host.can_sample()
    joules = []
    for value in (950_000, 150_000):
        (package / "energy_uj").write_text(str(value))
        joules.append(host.sample().joules)
    assert joules == pytest.approx([0.05, 0.25])
    assert host.sample().clock_mhz == 2400
    assert not Host(powercap=tmp_path / "none", cpufreq=tmp_path / "none").can_sample()


def test_samples_outside_the_measured_time_do_not_count() -> None:
    samples = [Sample(at=at, throttling=0x40 if at < 1 else 0, processes=(frozenset({1}),)) for at in (0.5, 1.5, 2.5)]
    assert conditions.interference(QUIET, conditions.select(samples, 1, 2)) == []
    assert conditions.interference(QUIET, samples) != []
