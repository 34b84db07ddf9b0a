#!/usr/bin/env python3
"""Check and time the GPU kernels of mlc-q4f16_1 one by one, and then a whole step.

    envs/mlc/bin/python benchmarks/mlc_gpu.py CONFIG [--variants 8x4 4x4 …] [--blocks 2x2x2x1x8x4 …] [--only matrices …]
        [--positions 512 …] [--plain] [--library FILE]

CONFIG is a config.json; its checkpoint is not needed, because weights are random. A variant is warps per block x blocks
per multiprocessor; --blocks are `mlc.cuda_products.Block`s. Matrices are read in turn from 400 MB of them, so that none
is still in a cache, and the calls are recorded and replayed as a graph, as in a step. Every result is
compared with numpy's float32. Needs a GPU and nvcc on PATH. If torch can be imported, a table of the
step's kernels is printed.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import tvm
from mlc_gpu_bench import RANDOM, Bench, error, random_matrix
from mlc_gpu_products import many, matrices
from tvm.runtime.vm import VirtualMachine

from quantmill.checkpoint.shards import read_json
from quantmill.devices import cuda as gpu
from quantmill.engines.quantmill_tvm import CudaSession
from quantmill.mlc import architecture, cuda_attention, cuda_products, cuda_vectors, library, source_config
from quantmill.mlc.cuda_matrices import Launch
from quantmill.mlc.cuda_products import Block

VARIANTS = ("16x2", "16x1", "8x3", "8x4", "8x2", "4x6")
BLOCKS = ("2x2x2x2x8x4", "4x2x1x2x8x4", "4x2x1x2x8x3", "2x2x2x1x8x4", "2x2x2x1x4x4")
PARTS = ("matrices", "products", "attention", "choice", "step")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--variants", nargs="+", default=VARIANTS)
    arguments.add_argument(
        "--blocks", nargs="*", default=BLOCKS, help="for many positions, in addition to the chosen ones"
    )
    arguments.add_argument("--positions", nargs="+", type=int, default=(16, 64, 128, 512, 2048))
    arguments.add_argument("--only", nargs="+", choices=PARTS)
    arguments.add_argument("--plain", action="store_true", help="dlight's kernels for products of many positions too")
    arguments.add_argument("--library", type=Path, help="compiled before, for the step")
    options = arguments.parse_args()
    shape = architecture.of(source_config.read(read_json(options.config), options.config), options.config)
    parts = options.only or PARTS
    device = tvm.cuda()
    copy = gpu.copy_bandwidth()
    print(f"copy bandwidth {copy / 1e9:.0f} GB/s", flush=True)
    bench = Bench(device)
    if "matrices" in parts:
        variants = [Launch(*map(int, name.split("x"))) for name in options.variants]
        matrices(bench, shape, variants, copy)
    if "products" in parts:
        chosen = cuda_products.WARPGROUP_BLOCKS if bench.warpgroups else cuda_products.BLOCKS
        blocks = [chosen, *((Block(*map(int, name.split("x"))),) for name in options.blocks)]
        many(bench, shape, blocks, options.positions, options.plain)
    if "attention" in parts:
        attention(bench, shape)
    if "choice" in parts:
        choice(bench, shape)
    if "step" in parts:
        step(bench, shape, options.library, copy)


def attention(bench: Bench, shape: architecture.Architecture) -> None:
    """Check and time attention of one position after many others."""
    layers, heads, kv_heads, size = (
        shape.num_hidden_layers,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
    )
    capacity, share = 4096, heads // kv_heads
    function = bench.compile({"f": cuda_attention.attend_one(layers, heads, kv_heads, size)})["f"]
    frequency = shape.frequencies()
    qkv = RANDOM.normal(0, 1, (1, 1, (heads + 2 * kv_heads) * size)).astype(np.float16)
    one_layer = [RANDOM.normal(0, 1, (kv_heads, capacity, size)).astype(np.float16) for _ in range(2)]
    cache = [bench.tensor(np.broadcast_to(array, (layers, *array.shape)).copy()) for array in one_layer]
    position, counter = bench.empty((1,), "int32"), bench.empty((kv_heads,), "int32")
    partial = bench.empty((heads, cuda_attention.splits(kv_heads), size + 2), "float32")
    out, inputs = bench.empty((1, 1, heads * size), "float16"), [bench.tensor(qkv), bench.tensor(frequency)]
    for here in (10, 63, 250, 300, 600, 1100, capacity - 1):
        position.copyfrom(np.array([here], np.int32))
        calls = [
            lambda n=layer: function(*inputs, position, counter, *cache, n, partial, out) for layer in range(layers)
        ]
        micros = bench.microseconds(calls)
        parts = qkv.astype(np.float32).reshape(-1, size)
        first, second = np.split(parts[: heads + kv_heads], 2, axis=1)
        angle = np.float32(here) * frequency
        turned = np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], 1
        ).astype(np.float16)
        one_layer[0][:, here], one_layer[1][:, here] = turned[heads:], parts[heads + kv_heads :]  # as the kernel does
        keys, values = (array[:, : here + 1].astype(np.float32) for array in one_layer)
        query = turned[:heads].astype(np.float32).reshape(kv_heads, share, size)
        scores = query @ keys.transpose(0, 2, 1) / size**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = (weights / weights.sum(-1, keepdims=True) @ values).reshape(-1)
        rate = 4 * kv_heads * size * (here + 1) / micros * 1e6
        print(
            f"attention after {here:5} {micros:7.2f} us {rate / 1e9:6.0f} GB/s  "
            f"error {error(out.numpy()[0, 0], wanted):.1e}  counters left {int(np.abs(counter.numpy()).sum())}",
            flush=True,
        )
    print(flush=True)


def choice(bench: Bench, shape: architecture.Architecture) -> None:
    """Check argmax of the logits, with ties, at the borders of threads and vectors."""
    function = bench.compile({"f": cuda_vectors.choose(shape.vocab_size)})["f"]
    token, position = bench.empty((1, 1), "int32"), bench.empty((1,), "int32")
    bias = np.zeros(shape.vocab_size, np.float32)
    bias[2] = -np.inf
    for equals in (
        [2, 7, 9],
        [shape.vocab_size - 1],
        [shape.vocab_size // 3, shape.vocab_size // 3 + 1, shape.vocab_size - 2],
        [0, 1],
    ):
        logits = RANDOM.normal(0, 1, shape.vocab_size).astype(np.float16)
        logits[equals] = 20
        given = bench.tensor(logits[None, None]), bench.tensor(bias)
        micros = bench.microseconds([lambda: function(*given, token, position, 1)] * 20)  # noqa: B023
        wanted = int(np.argmax(logits.astype(np.float32) + bias))
        print(f"choice {micros:7.2f} us  {int(token.numpy()[0, 0])} where {wanted} is right", flush=True)
    print(flush=True)


def step(bench: Bench, shape: architecture.Architecture, path: Path | None, copy: float) -> None:
    """Print tokens per second, and the time of each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder) / "model_lib.so"
            library.compile(shape, bench.target, path)
        machine = VirtualMachine(tvm.runtime.load_module(str(path)), bench.device)
    arrays = {}
    for name, (size, dtype) in shape.parameters().items():
        if name.endswith("q_weight"):
            arrays[name], arrays[name.replace("q_weight", "q_scale")] = random_matrix(size[0], size[1] * 8)
        elif not name.endswith("q_scale"):
            arrays[name] = RANDOM.normal(1, 0.1, size).astype(dtype)
    arrays = {name: arrays[name] for name in shape.parameters()}
    tied = shape.tie_word_embeddings
    read = sum(array.nbytes for name, array in arrays.items() if tied or not name.startswith("model.embed_tokens."))
    session = CudaSession(machine, bench.device, shape, arrays, np.zeros(shape.vocab_size, np.float32))
    prompt = RANDOM.integers(0, shape.vocab_size, 10).tolist()
    for positions in (256, 256, 1024):
        session.start(positions)
        times = []
        for _ in session.tokens(prompt, positions - len(prompt)):
            times.append(time.perf_counter())
        each = (times[-1] - times[0]) / (len(times) - 1)
        print(
            f"{positions} positions: {1 / each:.1f} tokens/s, {each * 1e6:.0f} us a step, {read / each / 1e9:.0f} GB/s,"
            f" {read / each / copy:.0%} of copy",
            flush=True,
        )
    for length in (512, 512, 512):
        session.start(length + 1)
        start = time.perf_counter()
        list(session.tokens(RANDOM.integers(0, shape.vocab_size, length).tolist(), 1))
        print(f"prefill of {length}: {(time.perf_counter() - start) * 1e3:.1f} ms", flush=True)
    try:
        import torch
    except ImportError:
        print("no torch here, so no table of kernels")
        return
    from torch.profiler import ProfilerActivity, profile

    session.start(256)
    list(session.tokens(prompt, 240))
    with profile(activities=[ProfilerActivity.CUDA]) as table:
        for _ in range(5):
            session.stream.replay(session.recording)
        torch.cuda.synchronize()
    print(table.key_averages().table(sort_by="cuda_time_total", row_limit=15, max_name_column_width=40))
    session.start(512)
    with profile(activities=[ProfilerActivity.CUDA]) as table:
        list(session.tokens(RANDOM.integers(0, shape.vocab_size, 511).tolist(), 1))
        torch.cuda.synchronize()
    print(table.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=40))


if __name__ == "__main__":
    main()
