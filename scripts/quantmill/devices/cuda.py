"""NVIDIA GPUs through libcuda and NVML, in the same way for every engine.

Function names and signatures: CUDA Driver API and NVML API references.
"""

import ctypes
import functools
import importlib.util
import os
import statistics
from types import ModuleType
from typing import Any

from quantmill.common.program import UserError
from quantmill.devices.gpu_state import Gpus

COPY_BYTES = 2 * 2**30  # far beyond the L2 cache
REPEATS = 9


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: Any, *arguments: Any) -> None:
    status = function(*arguments)
    if status:
        raise UserError(f"CUDA driver: {function.__name__} failed with error {status}")


def why_missing() -> str | None:
    """Return the reason why no GPU can be used, or None."""
    try:
        driver = _driver()
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) on this machine"
    status = driver.cuInit(0)
    return None if not status and count() else f"the NVIDIA driver sees no GPU (cuInit: {status})"


@functools.cache
def torch() -> ModuleType | None:
    """Return torch if this environment has one that sees a GPU. It is imported only now."""
    if importlib.util.find_spec("torch") is None:
        return None
    found = importlib.import_module("torch")
    return found if found.cuda.is_available() else None


def count() -> int:
    """Return the number of GPUs that this process sees; CUDA must be initialised."""
    number = ctypes.c_int()
    return 0 if _driver().cuDeviceGetCount(ctypes.byref(number)) else number.value


@functools.cache
def total_bytes() -> int:
    """Return the memory of the smallest GPU that this process sees."""
    driver, sizes = _driver(), []
    _call(driver.cuInit, 0)
    for number in range(count()):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        _call(driver.cuDeviceGet, ctypes.byref(device), number)
        _call(driver.cuDeviceTotalMem_v2, ctypes.byref(size), device)
        sizes.append(size.value)
    return min(sizes)


def nvml_devices() -> tuple[Any, list[Any]]:
    """Return pynvml and the handles of the GPUs in CUDA_VISIBLE_DEVICES, or of the first GPU if it is empty."""
    import pynvml  # only in environments that use a GPU

    pynvml.nvmlInit()
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return pynvml, [
        pynvml.nvmlDeviceGetHandleByUUID(name)
        if name.startswith(("GPU-", "MIG-"))
        else pynvml.nvmlDeviceGetHandleByIndex(int(name or 0))
        for name in names
    ]


def describe() -> dict[str, Any]:
    """Describe the visible GPUs by NVML; a value that one of them does not report is None.

    Names, total memory in bytes, total power limit in watts, driver, ECC of all, and the lowest current clocks in MHz.
    """
    nvml, handles = nvml_devices()
    ask = Gpus(nvml, handles).ask
    return {
        "name": " + ".join(dict.fromkeys(nvml.nvmlDeviceGetName(handle) for handle in handles)),
        "memory_bytes": ask(lambda boards: sum(board.total for board in boards), nvml.nvmlDeviceGetMemoryInfo),
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "ecc": ask(lambda modes: all(bool(mode[0]) for mode in modes), nvml.nvmlDeviceGetEccMode),
        "sm_clock_mhz": ask(min, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask(min, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        "power_limit_w": ask(lambda milliwatts: sum(milliwatts) / 1000, nvml.nvmlDeviceGetEnforcedPowerLimit),
    }


def used_bytes() -> int:
    """Return the memory in use on the GPUs, by all processes: a measurement has its GPUs for itself."""
    nvml, handles = nvml_devices()
    return sum(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)


def copy_bandwidth() -> float:
    """Return the summed bytes per second of device-to-device copies on each visible GPU, one after the other."""
    _call(_driver().cuInit, 0)
    return sum(_copy_bandwidth(number) for number in range(count()))


def _copy_bandwidth(number: int) -> float:
    """Copy `COPY_BYTES` on one GPU, timed by events; return bytes per second, read plus written (median)."""
    driver = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call(driver.cuDeviceGet, ctypes.byref(device), number)
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
