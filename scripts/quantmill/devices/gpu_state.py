"""Energy, clocks, temperature and other processes of NVIDIA GPUs (NVML API reference)."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, TypeVar

from quantmill.devices.conditions import Sample, count_others

Answer = TypeVar("Answer")
CONTEXT_BYTES = 256 * 2**20  # below the memory of any process with a CUDA context


class Gpus:
    """One GPU or several that work together; a value that one of them does not report is None."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self.nvml, self.handles = nvml, handles

    def ask(
        self, combine: Callable[[list[Any]], Answer], function: Callable[..., Any], *arguments: Any
    ) -> Answer | None:
        """Combine a function's answers for all GPUs."""
        try:
            return combine([function(handle, *arguments) for handle in self.handles])
        except self.nvml.NVMLError:
            return None

    def used_bytes(self) -> int | None:
        """Return the memory in use by processes, without the driver's reserve if NVML separates it."""

        def used(boards: list[Any]) -> int:
            return sum(board.used for board in boards)

        memory = self.ask(used, self.nvml.nvmlDeviceGetMemoryInfo, self.nvml.nvmlMemory_v2)
        return self.ask(used, self.nvml.nvmlDeviceGetMemoryInfo) if memory is None else memory

    def processes(self) -> tuple[frozenset[int], ...] | None:
        """Return the ids of other processes that compute on each GPU.

        In a container, NVML may report ids of another namespace, or hide the processes.
        """
        mine = os.getpid()

        def others(boards: list[Any]) -> tuple[frozenset[int], ...]:
            return tuple(frozenset(each.pid for each in board if each.pid != mine) for board in boards)

        return self.ask(others, self.nvml.nvmlDeviceGetComputeRunningProcesses)

    def company(self, own: Collection[int] = ()) -> list[str]:
        """Describe other users of the GPUs while no process of ours measures; empty if the GPUs are free.

        `own`: processes of a measured server that runs already; memory in use is then not reported.
        """
        cards, used = self.processes() or (), self.used_bytes()
        count = count_others(cards, own) if own else len(frozenset().union(*cards))
        if count > 0:
            return [f"{count} other process{'es' if count > 1 else ''} on the GPU"]
        if not own and used and used > CONTEXT_BYTES * len(self.handles):
            return [f"another program held {used / 1e9:.2g} GB of the GPU's memory"]
        return []

    def sample(self) -> Sample:
        """Sample the GPUs: total energy and memory, the lowest clocks, the highest temperature."""
        nvml = self.nvml

        def total(thousandths: list[int]) -> float:
            return sum(thousandths) / 1000

        return Sample(
            at=time.perf_counter(),
            joules=self.ask(total, nvml.nvmlDeviceGetTotalEnergyConsumption),
            watts=self.ask(total, nvml.nvmlDeviceGetPowerUsage),
            clock_mhz=self.ask(min, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self.ask(min, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            celsius=self.ask(max, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            used_bytes=self.used_bytes(),
            throttling=self.ask(partial(reduce, or_), nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0,
            processes=self.processes(),
        )
