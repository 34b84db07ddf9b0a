"""Run in envs/mlc: products of many positions by the GPU's sources, on this processor, against numpy.

    python products_checks.py FOLDER

Printed is each case's largest error over the root mean square of what is right.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
os.environ["TVM_USE_RUNTIME_LIB"] = "0"

import cuda_on_cpu
import numpy as np
import tvm

from quantmill.mlc import cuda_products, library
from quantmill.mlc.cuda_products import BLOCKS, FEW, WARPGROUP_BLOCKS, Block

# outputs, inputs, epilogue, positions, blocks
CASES = [
    (300, 96, "PLAIN", 17, FEW[1:]),
    (300, 128, "BIAS", 2, BLOCKS),
    (320, 288, "GATE", 33, BLOCKS),
    (128, 256, "RESIDUAL", 16, BLOCKS),
    (256, 128, "RESIDUAL", 129, BLOCKS),
    (320, 160, "GATE", 65, BLOCKS),
    (300, 256, "BIAS", 64, BLOCKS),
    (192, 1024, "PLAIN", 40, FEW),
    (300, 288, "PLAIN", 150, WARPGROUP_BLOCKS),
    (640, 1024, "GATE", 70, WARPGROUP_BLOCKS),
    (512, 1056, "RESIDUAL", 190, (Block(2, 2, 2, 1, 8, 4),)),
    (384, 576, "BIAS", 190, (Block(4, 2, 1, 2, 8, 3),)),
]
EPSILON = 1e-5
RANDOM = np.random.default_rng(0)


def arrange(x: np.ndarray) -> np.ndarray:
    """Return the order in which products read rows: 32 elements are a matrix [8, 4], transposed."""
    return np.ascontiguousarray(x.reshape(*x.shape[:-1], -1, 8, 4).swapaxes(-1, -2)).reshape(x.shape)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.sqrt(np.mean(wanted**2)))


def product(function: Any, outputs: int, inputs: int, epilogue: str, positions: int) -> float:
    """Return a product's distance from its formula."""
    words = RANDOM.integers(0, 2**32, (outputs, inputs // 8), dtype=np.uint32) & np.uint32(0xEEEEEEEE)
    scales = RANDOM.uniform(0.5, 1.5, (outputs, inputs // 32)).astype(np.float16) / 8
    x = RANDOM.normal(0, 1, (1, positions, inputs)).astype(np.float16)
    nibbles = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    weights = (nibbles.reshape(outputs, -1, 32).astype(np.float32) - 7) * scales[..., None].astype(np.float32)
    wanted = x[0].astype(np.float32) @ weights.reshape(outputs, inputs).T
    added = []
    if epilogue in ("BIAS", "RESIDUAL"):
        added = [RANDOM.normal(0, 1, (outputs,) if epilogue == "BIAS" else (1, positions, outputs)).astype(np.float16)]
        wanted = wanted + added[0].reshape(-1, outputs).astype(np.float32)
    if epilogue == "GATE":
        gate, up = np.split(wanted, 2, axis=1)
        wanted = arrange(gate / (1 + np.exp(-gate)) * up)
    out = tvm.runtime.tensor(np.full((1, *wanted.shape), np.nan, np.float16))
    function(*map(tvm.runtime.tensor, (arrange(x), words, scales, *added)), out)
    return error(out.numpy()[0].astype(np.float32), wanted)


errors, kept = {}, []
for warpgroups in (False, True):
    kernels = cuda_on_cpu.Kernels(warpgroups)
    kept.append(kernels)  # its address is part of its functions' names
    made = {f"case{number}": cuda_products.product(*case[:3], case[4]) for number, case in enumerate(CASES)}
    made["norm"] = cuda_products.rms_norm(160, EPSILON)
    folder = Path(sys.argv[1]) / str(warpgroups)
    folder.mkdir()
    kernels.load(folder)
    module = {name: function.with_attr("global_symbol", name) for name, function in made.items()}
    compiled = tvm.compile(tvm.IRModule(module), library.cpu_target())
    for number, case in enumerate(CASES):
        errors[f"warpgroups {warpgroups}, case {number}"] = product(compiled[f"case{number}"], *case[:4])
    cuda_products.product.cache_clear()
x = RANDOM.normal(0, 1, (1, 5, 160)).astype(np.float16)
weight = RANDOM.normal(1, 0.2, 160).astype(np.float16)
out = tvm.runtime.tensor(np.full(x.shape, np.nan, np.float16))
compiled["norm"](tvm.runtime.tensor(x), tvm.runtime.tensor(weight), out)
wanted = x.astype(np.float32)
wanted = wanted / np.sqrt(np.mean(wanted**2, -1, keepdims=True) + EPSILON) * weight.astype(np.float32)
errors["norm"] = error(out.numpy(), arrange(wanted))
print(json.dumps(errors))
