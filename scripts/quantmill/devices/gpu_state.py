"""NVIDIA GPUs' energy, clocks, temperature and company, asked of NVML (NVML API reference)."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from operator import or_
from typing import Any

from quantmill.devices.conditions import Sample, count_others

CONTEXT_BYTES = 256 * 2**20  # less than a process with a CUDA context takes on any board of today


class Gpus:
    """One GPU or several that work together; what one board, or the slice of one, does not tell is None."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self.nvml, self.handles = nvml, handles

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any] | None:
        """A function's answers of all of them."""
        try:
            return [function(handle, *arguments) for handle in self.handles]
        except self.nvml.NVMLError:
            return None

    def used_bytes(self) -> int | None:
        """Memory in use by processes; without what the driver reserves, where that is told apart."""
        memory = self._ask(self.nvml.nvmlDeviceGetMemoryInfo, self.nvml.nvmlMemory_v2)
        memory = memory or self._ask(self.nvml.nvmlDeviceGetMemoryInfo)
        return memory and sum(board.used for board in memory)

    def processes(self) -> tuple[frozenset[int], ...] | None:
        """The ids of processes other than this one that compute on each GPU.

        In a container NVML may know them by numbers of another namespace, or not at all: none may mean that none is
        shown.
        """
        found = self._ask(self.nvml.nvmlDeviceGetComputeRunningProcesses)
        mine = os.getpid()
        return found and tuple(frozenset(each.pid for each in board if each.pid != mine) for board in found)

    def company(self, own: Collection[int] = ()) -> list[str]:
        """Who is on the GPUs while none of our processes that measure is, in words; empty where they are free.

        `own`: processes of a server that is measured and runs already. What memory is its own is then not known.
        """
        cards, used = self.processes() or (), self.used_bytes()
        count = count_others(cards, own) if own else len(frozenset().union(*cards))
        if count > 0:
            return [f"{count} other process{'es' if count > 1 else ''} on the GPU"]
        if not own and used and used > CONTEXT_BYTES * len(self.handles):
            return [f"somebody else held {used / 1e9:.2g} GB of the GPU's memory"]
        return []

    def sample(self) -> Sample:
        """The GPUs now: energy and memory of all, the lowest clocks, the highest temperature."""
        nvml = self.nvml
        millijoules = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage)
        clocks = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        memory_clocks = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)
        celsius = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        return Sample(
            at=time.perf_counter(),
            joules=millijoules and sum(millijoules) / 1000,
            watts=milliwatts and sum(milliwatts) / 1000,
            clock_mhz=clocks and min(clocks),
            memory_clock_mhz=memory_clocks and min(memory_clocks),
            celsius=celsius and max(celsius),
            used_bytes=self.used_bytes(),
            throttling=reduce(or_, self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or (), 0),
            processes=self.processes(),
        )
