"""NVIDIA GPUs, through libcuda and NVML: the same answers for every engine, whatever it is built on.

Function names and signatures: CUDA Driver API and NVML API references.
"""

import ctypes
import os
import statistics
from collections.abc import Callable
from typing import Any

from common.program import UserError

COPY_BYTES = 2 * 2**30  # far beyond the L2 cache
REPEATS = 9


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: Any, *arguments: Any) -> None:
    status = function(*arguments)
    if status:
        raise UserError(f"CUDA driver: {function.__name__} failed with error {status}")


def why_missing() -> str | None:
    """None where a GPU can be used, else the reason why not."""
    try:
        driver = _driver()
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) on this machine"
    status = driver.cuInit(0)
    return None if not status and count() else f"the NVIDIA driver sees no GPU (cuInit: {status})"


def count() -> int:
    """GPUs that this process sees; CUDA was initialised before."""
    number = ctypes.c_int()
    return 0 if _driver().cuDeviceGetCount(ctypes.byref(number)) else number.value


def nvml_device() -> tuple[Any, Any]:
    """pynvml and the handle of the first visible GPU."""
    import pynvml  # only where there is a GPU

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if visible.startswith(("GPU-", "MIG-")):
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(visible)
    return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0))


def describe() -> dict[str, Any]:
    """What NVML tells of the first visible GPU; None where it does not tell.

    Name, memory in bytes, driver, ECC mode, clocks in MHz now, power limit in watts.
    """
    nvml, handle = nvml_device()

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return None  # this board, or this slice of one, does not tell

    memory, ecc = ask(nvml.nvmlDeviceGetMemoryInfo), ask(nvml.nvmlDeviceGetEccMode)
    power_limit = ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "memory_bytes": memory and memory.total,
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "ecc": ecc and bool(ecc[0]),
        "sm_clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        "power_limit_w": power_limit and power_limit / 1000,
    }


def used_bytes() -> int:
    """Memory in use on the GPU, by whoever uses it: a measurement has its GPU for itself."""
    nvml, handle = nvml_device()
    return nvml.nvmlDeviceGetMemoryInfo(handle).used


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a device-to-device copy of `COPY_BYTES`, timed by events (median)."""
    driver = _driver()
    _call(driver.cuInit, 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call(driver.cuDeviceGet, ctypes.byref(device), 0)
    _call(driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
    _call(driver.cuCtxSetCurrent, context)
    source, target = ctypes.c_uint64(), ctypes.c_uint64()
    start, stop = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        for pointer in (source, target):
            _call(driver.cuMemAlloc_v2, ctypes.byref(pointer), ctypes.c_size_t(COPY_BYTES))
        for event in (start, stop):
            _call(driver.cuEventCreate, ctypes.byref(event), 0)
        rates = []
        for _ in range(REPEATS + 1):  # the first warms up
            _call(driver.cuEventRecord, start, None)
            _call(driver.cuMemcpyDtoDAsync_v2, target, source, ctypes.c_size_t(COPY_BYTES), None)
            _call(driver.cuEventRecord, stop, None)
            _call(driver.cuEventSynchronize, stop)
            milliseconds = ctypes.c_float()
            _call(driver.cuEventElapsedTime, ctypes.byref(milliseconds), start, stop)
            rates.append(2 * COPY_BYTES / (milliseconds.value / 1000))
        return statistics.median(rates[1:])
    finally:
        for pointer in (source, target):
            if pointer.value:
                driver.cuMemFree_v2(pointer)
        driver.cuDevicePrimaryCtxRelease_v2(device)
