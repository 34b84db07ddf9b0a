"""Run in envs/mlc: attention of one position by the GPU's sources, on this processor, against numpy.

    python attention_checks.py FOLDER

Printed is each case's largest error over the root mean square of what is right, and what is left of the counters.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
os.environ["TVM_USE_RUNTIME_LIB"] = "0"

import cuda_on_cpu
import numpy as np
import tvm

from quantmill.mlc import cuda_attention, library

# heads, key-value heads, head's size, positions before: one block a head, many, the last of them with one position
CASES = [(4, 4, 128, 0), (4, 4, 128, 256), (4, 2, 96, 700), (2, 1, 64, 1023), (2, 1, 64, 1024), (8, 1, 64, 900)]
CAPACITY = 1088
FREQUENCY = 0.1
RANDOM = np.random.default_rng(0)


def reference_attention(qkv: np.ndarray, keys: np.ndarray, values: np.ndarray, here: int) -> np.ndarray:
    """Of qkv [heads + 2 kv_heads, size], keys and values [kv_heads, C, size], by the formula; [heads, size]."""
    kv_heads, _, size = keys.shape
    heads = len(qkv) - 2 * kv_heads
    low, high = np.split(qkv[: heads + kv_heads].astype(np.float64), 2, axis=1)
    sine, cosine = np.sin(here * FREQUENCY), np.cos(here * FREQUENCY)
    rotated = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=1).astype(np.float16)
    found = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        key = np.concatenate([keys[group, :here], rotated[heads + group, None]]).astype(np.float64)
        value = np.concatenate([values[group, :here], qkv[heads + kv_heads + group, None]]).astype(np.float64)
        scores = key @ rotated[head].astype(np.float64) / np.sqrt(size)
        weights = np.exp(scores - scores.max())
        found.append(weights @ value / weights.sum())
    return np.array(found)


kernels = cuda_on_cpu.Kernels()
sizes = [case[:3] for case in CASES]
functions = {f"f{n}": cuda_attention.attend_one(2, *size) for n, size in enumerate(sizes)}
kernels.load(Path(sys.argv[1]))
module = tvm.IRModule({name: made.with_attr("global_symbol", name) for name, made in functions.items()})
compiled = tvm.compile(module, library.cpu_target())
results = []
for number, (heads, kv_heads, size, here) in enumerate(CASES):
    qkv = RANDOM.normal(0, 1, (heads + 2 * kv_heads, size)).astype(np.float16)
    cache = [RANDOM.normal(0, 1, (2, kv_heads, CAPACITY, size)).astype(np.float16) for _ in range(2)]
    wanted = reference_attention(qkv, cache[0][1], cache[1][1], here)
    frequency = np.full(size // 2, FREQUENCY, np.float32)
    counter, partial = np.zeros(kv_heads, np.int32), np.zeros((heads, cuda_attention.splits(kv_heads), size + 2))
    arrays = [qkv.reshape(1, 1, -1), frequency, np.array([here], np.int32), counter, *cache]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    room, out = tvm.runtime.tensor(partial.astype(np.float32)), tvm.runtime.empty((1, 1, heads * size), "float16")
    for _ in range(2):  # the counters are ready for the next one
        compiled[f"f{number}"](*tensors, 1, room, out)
    error = np.abs(out.numpy().reshape(heads, size) - wanted).max() / np.sqrt(np.mean(wanted**2))
    results.append((float(error), int(np.abs(tensors[3].numpy()).sum())))
print(json.dumps(results))
