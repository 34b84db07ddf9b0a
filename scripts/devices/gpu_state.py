"""An NVIDIA GPU's energy, clocks, temperature and company, asked of NVML (NVML API reference)."""

import os
import time
from collections.abc import Callable
from typing import Any

from devices.conditions import Sample

CONTEXT_BYTES = 256 * 2**20  # less than a process with a CUDA context takes on any board of today


class Gpu:
    """One GPU; what the board, or the slice of one, does not tell is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def used_bytes(self) -> int | None:
        """Memory in use by processes; without what the driver reserves, where that is told apart."""
        memory = self._ask(self.nvml.nvmlDeviceGetMemoryInfo, self.nvml.nvmlMemory_v2)
        memory = memory or self._ask(self.nvml.nvmlDeviceGetMemoryInfo)
        return memory and memory.used

    def processes(self) -> int | None:
        """Processes other than this one that compute on the GPU.

        In a container NVML may know them by numbers of another namespace, or not at all: numbers tell nothing but how
        many there are, and none may mean that none is shown.
        """
        found = self._ask(self.nvml.nvmlDeviceGetComputeRunningProcesses)
        return None if found is None else sum(process.pid != os.getpid() for process in found)

    def company(self) -> list[str]:
        """Who is on the GPU while none of our processes that measure is, in words; empty where it is free."""
        count, used = self.processes(), self.used_bytes()
        if count:
            return [f"{count} other process{'es' if count > 1 else ''} on the GPU"]
        if used and used > CONTEXT_BYTES:
            return [f"somebody else held {used / 1e9:.2g} GB of the GPU's memory"]
        return []

    def sample(self) -> Sample:
        """The GPU now."""
        nvml = self.nvml
        millijoules, milliwatts = (
            self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption),
            self._ask(nvml.nvmlDeviceGetPowerUsage),
        )
        return Sample(
            at=time.perf_counter(),
            joules=None if millijoules is None else millijoules / 1000,
            watts=None if milliwatts is None else milliwatts / 1000,
            clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            celsius=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            used_bytes=self.used_bytes(),
            throttling=self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0,
            processes=self.processes(),
        )
