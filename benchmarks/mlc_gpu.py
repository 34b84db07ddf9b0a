#!/usr/bin/env python3
"""The GPU's kernels of mlc-q4f16_1 one by one, checked and timed, and then a whole step.

    envs/mlc/bin/python benchmarks/mlc_gpu.py CONFIG [--variants 8x4 4x4 …] [--only matrices] [--plain] [--library FILE]

CONFIG is a config.json, of a checkpoint that need not be there: weights are random. A variant is warps of a block x
blocks of a multiprocessor. Matrices are read in turn from 400 MB of them, so that none is still in a cache, and the
calls are recorded and replayed as a graph, as in a step. Every result is compared with numpy's float32. Needs a GPU and
nvcc on PATH; where torch can be imported too, a table of the step's kernels is printed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "scripts"))

import numpy as np  # noqa: E402
import tvm  # noqa: E402
from tvm.relax.frontend import nn  # noqa: E402
from tvm.relax.frontend.nn import spec  # noqa: E402
from tvm.runtime.vm import VirtualMachine  # noqa: E402

from checkpoint.shards import read_json  # noqa: E402
from devices import cuda as gpu  # noqa: E402
from engines.cuda_stream import Stream  # noqa: E402
from engines.mlc import CudaSession  # noqa: E402
from mlc import architecture, cuda, cuda_attention, cuda_matrices, cuda_vectors, library, model, source_config  # noqa: E402
from mlc.cuda_matrices import Launch  # noqa: E402
from mlc.rope import frequencies  # noqa: E402

VARIANTS = ("16x2", "16x1", "8x3", "8x4", "8x2", "4x6")
BYTES = 400_000_000
REPLAYS = 20
EPSILON = 1e-5
RANDOM = np.random.default_rng(0)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--variants", nargs="+", default=VARIANTS)
    arguments.add_argument("--only", nargs="+", choices=("matrices", "attention", "choice", "step"))
    arguments.add_argument("--plain", action="store_true", help="dlight's kernels for the same products too")
    arguments.add_argument("--library", type=Path, help="compiled before, for the step")
    options = arguments.parse_args()
    shape = architecture.of(source_config.read(read_json(options.config), options.config), options.config)
    parts = options.only or ("matrices", "attention", "choice", "step")
    device = tvm.cuda()
    copy = gpu.copy_bandwidth()
    print(f"copy bandwidth {copy / 1e9:.0f} GB/s", flush=True)
    bench = Bench(device)
    if "matrices" in parts:
        variants = [Launch(*map(int, name.split("x"))) for name in options.variants]
        matrices(bench, shape, variants, options.plain, copy)
    if "attention" in parts:
        attention(bench, shape)
    if "choice" in parts:
        choice(bench, shape)
    if "step" in parts:
        step(bench, shape, options.library, copy)


class Bench:
    """A device, and how long recorded calls take on it."""

    def __init__(self, device: tvm.runtime.Device) -> None:
        self.device = device
        self.empty((1,), "int32")  # a stream wants the context that the first allocation makes
        self.stream = Stream(device)
        self.target = library.cuda_target(None)

    def tensor(self, array: np.ndarray) -> tvm.runtime.Tensor:
        return tvm.runtime.tensor(array, self.device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> tvm.runtime.Tensor:
        return self.tensor(np.zeros(shape, dtype))

    def compile(self, functions: dict[str, tvm.tirx.PrimFunc]) -> Any:
        """Functions of a module by name."""
        module = tvm.IRModule({name: made.with_attr("global_symbol", name) for name, made in functions.items()})
        with self.target:
            return tvm.compile(library.launches(self.target)(module), self.target)

    def microseconds(self, calls: list[Callable[[], object]]) -> float:
        """Of a call, in a recording of all."""

        def once() -> None:
            for call in calls:
                call()

        once()
        self.device.sync(self.stream.handle.value)
        recording = self.stream.record(once)
        best = float("inf")
        for _ in range(3):
            self.stream.replay(recording)
            self.device.sync(self.stream.handle.value)
            start = time.perf_counter()
            for _ in range(REPLAYS):
                self.stream.replay(recording)
            self.device.sync(self.stream.handle.value)
            best = min(best, time.perf_counter() - start)
        self.stream.forget(recording)
        return best / REPLAYS / len(calls) * 1e6


def products(shape: architecture.Architecture) -> Iterator[tuple[str, int, int, bool, bool, bool]]:
    """Name, outputs, inputs, whether normed, added to and gated, of a step's products."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield "qkv", shape.qkv_size, hidden, True, shape.qkv_bias, False
    yield "o_proj", hidden, shape.num_attention_heads * shape.head_dim, False, True, False
    yield "gate_up", 2 * inner, hidden, True, False, True
    yield "down", hidden, inner, False, True, False
    yield "head", shape.vocab_size, hidden, True, False, False


def random_matrix(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Words without the nibble 15, and scales, of weights with a product about as large as the vector."""
    words = RANDOM.integers(0, 2**32, (outputs, inputs // 8), dtype=np.uint32) & np.uint32(0xEEEEEEEE)
    scales = RANDOM.uniform(0.5, 1.5, (outputs, inputs // 32)) / (5 * inputs**0.5)
    return words, scales.astype(np.float16)


def expected(words: np.ndarray, scales: np.ndarray, x: np.ndarray, norm: Any, add: Any, gate: bool) -> np.ndarray:
    """Float32, by the formulas; x is rounded to float16 after the norm, as the kernels do."""
    x = x.astype(np.float32)
    if norm is not None:
        x = (x / np.sqrt(np.mean(x * x) + EPSILON) * norm.astype(np.float32)).astype(np.float16).astype(np.float32)
    out = np.empty(len(words), np.float32)
    for start in range(0, len(words), 4096):
        part = slice(start, start + 4096)
        nibbles = (words[part][..., None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
        weights = (nibbles.reshape(len(nibbles), -1, 32).astype(np.float32) - 7) * scales[part][..., None]
        out[part] = weights.reshape(len(nibbles), -1) @ x
    if gate:
        first, second = np.split(out, 2)
        out = first / (1 + np.exp(-first)) * second
    return out if add is None else out + add.astype(np.float32)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over the root mean square of what is wanted."""
    return float(np.abs(found.astype(np.float32) - wanted).max() / np.sqrt(np.mean(wanted**2)))


def matrices(bench: Bench, shape: architecture.Architecture, variants: list[Launch], plain: bool, copy: float) -> None:
    """Every product in every variant."""
    for name, outputs, inputs, normed, added, gate in products(shape):
        words, scales = random_matrix(outputs, inputs)
        x = RANDOM.normal(0, 1, (1, 1, inputs)).astype(np.float16)
        norm = RANDOM.normal(1, 0.2, inputs).astype(np.float16) if normed else None
        add = RANDOM.normal(0, 1, outputs).astype(np.float16) if added else None
        wanted = expected(words, scales, x[0, 0], norm, add, gate)
        copies = max(4, -(-BYTES // (words.nbytes + scales.nbytes)))
        weights = [(bench.tensor(words), bench.tensor(scales)) for _ in range(copies)]
        extra = [bench.tensor(array) for array in (norm, add) if array is not None]
        out, given = bench.empty((1, 1, len(wanted)), "float16"), bench.tensor(x)
        epsilon = EPSILON if normed else None
        made = {
            f"v{variant.warps}x{variant.resident}": cuda_matrices.matrix_vector(
                outputs, inputs, variant, epsilon=epsilon, add=(outputs,) if added else None, gate=gate
            )
            for variant in variants
        }
        compiled = bench.compile(made)

        def report(variant: str, micros: float, found: np.ndarray) -> None:
            rate = (words.nbytes + scales.nbytes) / micros * 1e6  # noqa: B023
            print(
                f"{name:8} {outputs:6} x {inputs:6} {variant:8} {micros:7.2f} us {rate / 1e9:6.0f} GB/s "  # noqa: B023
                f"{rate / copy:5.0%} of copy  error {error(found, wanted):.1e}",  # noqa: B023
                flush=True,
            )

        for variant in made:
            function = compiled[variant]
            calls = [lambda w=w, f=function: f(given, *w, *extra, out) for w in weights]  # noqa: B023
            report(variant[1:], bench.microseconds(calls), out.numpy()[0, 0])
        if plain:
            machine = plain_product(bench, outputs, inputs, normed, added, gate)
            parameters = [[*w, *extra] for w in weights]
            calls = [lambda p=p: machine["forward"](given, *p) for p in parameters]  # noqa: B023
            micros = bench.microseconds(calls)
            report("dlight", micros, machine["forward"](given, *parameters[0]).numpy()[0, 0])
        print(flush=True)


class Plain(cuda.Kernels):
    """Tensor expressions for one position too."""

    linear = model.Kernels.linear
    gated = model.Kernels.gated


class Product(nn.Module):
    """One product, as the model calls it."""

    def __init__(self, outputs: int, inputs: int, normed: bool, added: bool, gate: bool) -> None:
        self.kernels = Plain()
        self.layer, self.added, self.gate = model.Linear(self.kernels, outputs, inputs), added, gate
        self.norm = model.RMSNorm(inputs, EPSILON) if normed else None
        self.add = nn.Parameter((outputs,), "float16") if added else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """[1, 1, inputs] -> [1, 1, outputs]."""
        if self.gate:
            return self.kernels.gated(x, self.layer, self.norm)
        return self.kernels.linear(x, self.layer, self.norm, self.add)


def plain_product(bench: Bench, *product: Any) -> VirtualMachine:
    """dlight's kernels of a product."""
    made = Product(*product)
    given = {"x": spec.Tensor([1, 1, made.layer.inputs], "float16"), "$": {"param_mode": "plain"}}
    module = made.export_tvm(spec=nn.spec.ModuleSpec.from_raw({"forward": given}, made))[0]
    with bench.target:
        passes = library.cuda_passes(bench.target)
        return VirtualMachine(tvm.compile(module, bench.target, relax_pipeline=passes), bench.device)


def attention(bench: Bench, shape: architecture.Architecture) -> None:
    """One position after so many others, in every layer."""
    layers, heads, kv_heads, size = (
        shape.num_hidden_layers,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
    )
    capacity, share = 4096, heads // kv_heads
    function = bench.compile({"f": cuda_attention.attend_one(layers, heads, kv_heads, size)})["f"]
    frequency = frequencies(shape)
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
    """The largest of the logits, with equals, at places that threads and vectors cut."""
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
    """Tokens a second, and what the kernels take."""
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
