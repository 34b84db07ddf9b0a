"""The processors' energy and clock as Linux reports them: often to root alone, and not on virtual machines.

Sources: the kernel's powercap and cpufreq documentation.
"""

import os
import time
from pathlib import Path

from quantmill.devices import cpu
from quantmill.devices.conditions import Sample

POWERCAP = Path("/sys/class/powercap")
CPUFREQ = Path("/sys/devices/system/cpu")


class Host:
    """Energy of all processor packages (RAPL), and the highest clock of the processors that we may use."""

    def __init__(self, powercap: Path = POWERCAP, cpufreq: Path = CPUFREQ) -> None:
        packages = [path for path in sorted(powercap.glob("*-rapl:*")) if path.name.count(":") == 1]
        packages = [path for path in packages if _text(path / "name").startswith("package")]
        self.packages = [path for path in packages if os.access(path / "energy_uj", os.R_OK)]
        self.ranges = [int(_text(path / "max_energy_range_uj")) for path in self.packages]
        self.last = [int(_text(path / "energy_uj")) for path in self.packages]
        self.microjoules = 0
        clocks = [cpufreq / f"cpu{number}/cpufreq/scaling_cur_freq" for number in sorted(cpu.processors())]
        self.clocks = [path for path in clocks if os.access(path, os.R_OK)]

    def can_sample(self) -> bool:
        """Return whether any sensor is readable."""
        return bool(self.packages or self.clocks)

    def sample(self) -> Sample:
        """Sample the processors."""
        now = [int(_text(path / "energy_uj")) for path in self.packages]
        for value, last, size in zip(now, self.last, self.ranges, strict=True):
            self.microjoules += value - last if value >= last else value - last + size  # the counter wrapped around
        self.last = now
        return Sample(
            at=time.perf_counter(),
            joules=self.microjoules / 1e6 if self.packages else None,
            clock_mhz=max(int(_text(path)) for path in self.clocks) / 1000 if self.clocks else None,
        )


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.exists() else ""
