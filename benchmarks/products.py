#!/usr/bin/env python3
"""Time one position's matrix products on a GPU by kernel: the four of a block, with merged projections.

    envs/gptqmodel/bin/python benchmarks/products.py

Random symmetric 4-bit weights with groups of 128, more of them than a GPU's cache holds, one after another in a CUDA
graph. Prints the median of seven runs, in microseconds, and the largest error over the largest value, against float64.
`atomics` is Marlin with atomic additions in any order, `half sums` Marlin with additions in float16, `float16` cuBLAS
on weights of that type.
"""

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
os.environ.setdefault("GPTQMODEL_OFFLINE", "1")

import torch
from gptqmodel.utils import awq, marlin
from gptqmodel.utils.marlin_scalar_type import scalar_types

from quantmill.engines.decoding import gemv

GROUP, BYTES, RUNS = 128, 200_000_000, 7
SHAPES = {  # inputs, outputs: q, k and v; o; gate and up; down
    "demo": [(256, 512), (256, 256), (256, 1280), (640, 256)],
    "1.1B": [(2048, 2560), (2048, 2048), (2048, 11264), (5632, 2048)],
    "7B": [(4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096)],
}


def microseconds(product: Callable[[int], torch.Tensor], count: int) -> float:
    """Return the median time of one of `count` products with different weights, in a CUDA graph."""
    for number in range(count):
        product(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            product(number)
    graph.replay()
    found = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * start.elapsed_time(end) / count)
    return statistics.median(found)


def measure(inputs: int, outputs: int) -> dict[str, tuple[float, float]]:
    """Print the time and error of each kernel."""
    copies = max(24, min(200, BYTES * 2 // (inputs * outputs)))
    words = torch.randint(-(2**31), 2**31 - 1, (copies, inputs // 8, outputs), dtype=torch.int32, device="cuda")
    scales = (torch.rand(inputs // GROUP, outputs, device="cuda") * 0.004 + 0.001).half()
    sevens = torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32, device="cuda")
    x = torch.randn(1, inputs, device="cuda").half()
    unpacked = [gemv.unpack_layer("gptq", {"qweight": each, "qzeros": sevens, "scales": scales}) for each in words]
    numbers, zeros, _ = unpacked[0]
    weight = ((numbers - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)).T
    expected = x.double() @ weight.double().T
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    workspace = marlin.marlin_make_workspace_new(x.device)
    permuted = marlin.marlin_permute_scales(scales, inputs, outputs, GROUP)
    repacked = [marlin.gptq_marlin_repack(each, none, inputs, outputs, 4, dtype=torch.float16) for each in words]
    laid = [gemv.layout(*each) for each in unpacked]
    halves = [weight.half() for _ in range(max(4, BYTES // (2 * inputs * outputs)))]

    def by_marlin(number: int, atomics: bool = False, float32: bool = True) -> torch.Tensor:
        operands = (repacked[number], None, permuted, None, none, none, none, workspace, scalar_types.uint4b8)
        sizes = {"size_m": 1, "size_n": outputs, "size_k": inputs}
        return marlin.gptq_marlin_gemm(x, None, *operands, **sizes, use_atomic_add=atomics, use_fp32_reduce=float32)

    def by_gemv(number: int) -> torch.Tensor:
        rows, points, steps = laid[number]
        return awq.awq_gemv_forward(x, rows, steps, points, GROUP)

    kernels = {
        "Marlin": by_marlin,
        "atomics": lambda number: by_marlin(number, atomics=True),
        "half sums": lambda number: by_marlin(number, float32=False),
        "GEMV": by_gemv,
        "float16": lambda number: torch.nn.functional.linear(x, halves[number % len(halves)]),
    }
    found = {}
    for name, kernel in kernels.items():
        error = (kernel(0).double() - expected).abs().max() / expected.abs().max()
        found[name] = (microseconds(kernel, copies), float(error))
    return found


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    for model, shapes in SHAPES.items():
        block: dict[str, float] = {}
        for inputs, outputs in shapes:
            found = measure(inputs, outputs)
            block = {name: block.get(name, 0.0) + time for name, (time, _) in found.items()}
            figures = ", ".join(f"{name} {time:.2f} ({error:.0e})" for name, (time, error) in found.items())
            print(f"{model} {inputs} x {outputs}: {figures}", flush=True)
        print(f"{model}, a block: " + ", ".join(f"{name} {time:.1f}" for name, time in block.items()), flush=True)


if __name__ == "__main__":
    main()
