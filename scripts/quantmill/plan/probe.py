"""Speed of this machine: a matrix product and a copy, measured in a few seconds."""

import subprocess
import timeit
from pathlib import Path

import numpy as np

from quantmill import devices
from quantmill.common.program import run_child
from quantmill.devices import cpu
from quantmill.plan.resources import H200, Machine

SIZE = 2048  # of a square matrix on a CPU
PRODUCT = """
import timeit, torch
a = torch.randn(8192, 8192, dtype=torch.float16, device="cuda")
print(2 * 8192**3 / min(timeit.repeat(lambda: (a @ a, torch.cuda.synchronize()), number=1)))
"""


def measure(device: str, torch_python: Path) -> tuple[Machine, str]:
    """Measure a device. Returns its speed, and in words if part of it could not be measured.

    Without a GPU, the speed is an H200's. Without torch, the product is in proportion to the copy, as an H200's.
    """
    if device == "cpu":
        return Machine(_product(), devices.copy_bandwidth("cpu", cpu.available_threads())), ""
    if devices.cuda.why_missing():
        return H200, ", as on an NVIDIA H200: no GPU is here"
    bandwidth = devices.cuda.copy_bandwidth() / devices.cuda.count()
    memory = devices.cuda.total_bytes()
    if torch_python.is_file():
        ran = run_child([torch_python, "-P", "-c", PRODUCT], stdout=subprocess.PIPE)
        if not ran.returncode:
            return Machine(float(ran.stdout), bandwidth, gpu_memory=memory), ""
    flops = bandwidth * H200.flops / H200.bandwidth
    return Machine(flops, bandwidth, gpu_memory=memory), ", by its copies alone: envs/torch is not built"


def _product() -> float:
    """FLOP a second of a float32 product on all processors (best of several)."""
    matrix = np.ones((SIZE, SIZE), np.float32)
    return 2 * SIZE**3 / min(timeit.repeat(lambda: matrix @ matrix, number=1))
