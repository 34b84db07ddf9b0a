"""The host's processor and memory."""

import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COPY_BYTES = 256 * 2**20  # well beyond any cache
REPEATS = 7
# Schedulers and Snakemake's shell set them. MKL obeys them instead of the number that an engine is given.
THREAD_VARIABLES = {f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS", "GOTO", "NUMEXPR")}
VECTORS = ("avx", "fma", "f16c", "bmi", "sse", "asimd", "sve", "fp")  # x86 and Arm


def processors() -> frozenset[int]:
    """Return the processors that this process may use; a container or a scheduler may allow fewer than exist."""
    return frozenset(os.sched_getaffinity(0))


def available_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(processors())


def limit_threads(text: str) -> int:
    """Parse a number of threads, at most the processors that this process may use."""
    return min(int(text), available_threads())


def environment() -> dict[str, str]:
    """Return the environment without thread counts, for a process that is told its number of threads."""
    return {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}


def flags() -> set[str]:
    """Return the processor's flags by Linux's names; empty if unknown."""
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split())


def _cpuinfo(key: str) -> str:
    """Return the first value of a key in /proc/cpuinfo, or an empty text."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def features() -> list[str]:
    """Return the processor's vector instructions by Linux's names; empty if unknown."""
    return sorted(word for word in flags() if word.startswith(VECTORS))


def has_vnni() -> bool:
    """Return whether one instruction adds products of int8 in 32 bits (VNNI)."""
    return any("vnni" in feature for feature in features())


def has_float16() -> bool:
    """Return whether the processor multiplies float16 (AVX512-FP16, Arm's FP16); True if its features are unknown."""
    return not (words := features()) or any(word in ("avx512_fp16", "asimdhp") for word in words)


def has_amx() -> bool:
    """Return whether the processor multiplies matrices (x86's AMX)."""
    return "amx_tile" in flags()


def describe(threads: int) -> dict[str, Any]:
    """Return the processor's name and the threads used."""
    return {"name": _cpuinfo("model name") or platform.processor() or platform.machine(), "threads": threads}


def copy_bandwidth(threads: int) -> float:
    """Copy between two arrays of `COPY_BYTES`; return bytes per second, read plus written (median)."""
    import numpy as np  # half of the start of programs that use nothing else of it

    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    pieces = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    seconds = []
    with ThreadPoolExecutor(threads) as pool:  # numpy releases the interpreter lock while it copies
        for _ in range(REPEATS):
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), pieces))
            seconds.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / statistics.median(seconds)
