"""The matrix products of mlc_gpu.py: of one position, and of many."""

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import numpy as np
import tvm
from mlc_gpu_bench import EPSILON, RANDOM, Bench, error, random_matrix
from tvm import te
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec
from tvm.runtime.vm import VirtualMachine

from quantmill.mlc import architecture, cuda, cuda_matrices, cuda_products, library, model
from quantmill.mlc.cuda_matrices import Launch
from quantmill.mlc.cuda_products import Block

BYTES = 400_000_000


def products(shape: architecture.Architecture) -> Iterator[tuple[str, int, int, bool, bool, bool]]:
    """Yield name, outputs, inputs, and flags (normed, added to, gated) of a step's products."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield "qkv", shape.qkv_size, hidden, True, shape.qkv_bias, False
    yield "o_proj", hidden, shape.num_attention_heads * shape.head_dim, False, True, False
    yield "gate_up", 2 * inner, hidden, True, False, True
    yield "down", hidden, inner, False, True, False
    yield "head", shape.vocab_size, hidden, True, False, False


def reference(words: np.ndarray, scales: np.ndarray, x: np.ndarray, norm: Any, add: Any, gate: bool) -> np.ndarray:
    """Compute float32 [S, results] of x [S, inputs]; x is rounded to float16 after the norm, as in the kernels."""
    x = x.astype(np.float32)
    if norm is not None:
        x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPSILON) * norm.astype(np.float32)
        x = x.astype(np.float16).astype(np.float32)
    out = np.empty((len(x), len(words)), np.float32)
    for start in range(0, len(words), 4096):
        part = slice(start, start + 4096)
        nibbles = (words[part][..., None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
        weights = (nibbles.reshape(len(nibbles), -1, 32).astype(np.float32) - 7) * scales[part][..., None]
        out[:, part] = x @ weights.reshape(len(nibbles), -1).T
    if gate:
        first, second = np.split(out, 2, axis=1)
        out = first / (1 + np.exp(-first)) * second
    return out if add is None else out + add.astype(np.float32)


def matrices(bench: Bench, shape: architecture.Architecture, variants: list[Launch], copy: float) -> None:
    """Check and time each product of one position in each variant."""
    for name, outputs, inputs, normed, added, gate in products(shape):
        words, scales = random_matrix(outputs, inputs)
        x = RANDOM.normal(0, 1, (1, 1, inputs)).astype(np.float16)
        norm = RANDOM.normal(1, 0.2, inputs).astype(np.float16) if normed else None
        add = RANDOM.normal(0, 1, outputs).astype(np.float16) if added else None
        wanted = reference(words, scales, x[0], norm, add, gate)[0]
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
        print(flush=True)


def arrange(x: np.ndarray) -> np.ndarray:
    """Arrange rows for products of many positions: each 32 elements are a transposed matrix [8, 4]."""
    return np.ascontiguousarray(x.reshape(*x.shape[:-1], -1, 8, 4).swapaxes(-1, -2)).reshape(x.shape)


def many(
    bench: Bench, shape: architecture.Architecture, blocks: list[tuple[Block, ...]], counts: list[int], plain: bool
) -> None:
    """Time each product of many positions in each choice of blocks; check a few positions."""
    for name, outputs, inputs, _, added, gate in products(shape):
        words, scales = random_matrix(outputs, inputs)
        copies = max(4, -(-BYTES // (words.nbytes + scales.nbytes)))
        weights = [(bench.tensor(words), bench.tensor(scales)) for _ in range(copies)]
        epilogue = "GATE" if gate else "PLAIN" if not added else "BIAS" if name == "qkv" else "RESIDUAL"
        made = {
            f"v{number}": cuda_products.product(outputs, inputs, epilogue, choice)
            for number, choice in enumerate(blocks)
        }
        compiled = bench.compile(made)
        machine = plain_product(bench, outputs, inputs, gate) if plain else None
        x = RANDOM.normal(0, 1, (1, max(counts), inputs)).astype(np.float16)
        add = RANDOM.normal(0, 1, (outputs,) if epilogue == "BIAS" else (1, max(counts), outputs)).astype(np.float16)
        checked = np.array(sorted({0, 1, *(count // 3 for count in counts), *(count - 1 for count in counts)}))
        products_only = reference(words, scales, x[0, checked], None, None, gate)
        for count in counts:
            places, wanted = checked[checked < count], products_only[checked < count]
            extra = [add if epilogue == "BIAS" else add[:, :count].copy()] if added else []
            given, arranged = bench.tensor(x[:, :count].copy()), bench.tensor(arrange(x[:, :count]))
            out = bench.empty((1, count, wanted.shape[1]), "float16")

            def report(variant: str, micros: float, found: np.ndarray, wanted: np.ndarray) -> None:
                flops = 2 * outputs * inputs * count  # noqa: B023
                print(
                    f"{name:8} {outputs:6} x {inputs:6} x {count:4} {variant:34} {micros:8.2f} us "  # noqa: B023
                    f"{flops / micros / 1e6:5.0f} TFLOP/s  error {error(found, wanted):.1e}",
                    flush=True,
                )

            full = arrange(wanted) if gate else wanted
            full = full + (extra[0] if epilogue == "BIAS" else extra[0][0, places]) if added else full
            tensors = [bench.tensor(array) for array in extra]
            for number, choice in enumerate(blocks):
                function = compiled[f"v{number}"]
                calls = [lambda w=w, f=function: f(arranged, *w, *tensors, out) for w in weights]  # noqa: B023
                micros = bench.microseconds(calls)
                label = "chosen" if len(choice) > 1 else "x".join(map(str, astuple(choice[0])))
                report(label, micros, out.numpy()[0, places], full)
            if machine is not None:
                calls = [lambda w=w: machine["forward"](given, *w) for w in weights]  # noqa: B023
                micros = bench.microseconds(calls)
                report(
                    "dlight, nothing added", micros, machine["forward"](given, *weights[0]).numpy()[0, places], wanted
                )
        print(flush=True)
    norms(bench, shape, counts)


def norms(bench: Bench, shape: architecture.Architecture, counts: list[int]) -> None:
    """Check and time the norm of many positions."""
    function = bench.compile({"f": cuda_products.rms_norm(shape.hidden_size, EPSILON)})["f"]
    for count in counts:
        x = RANDOM.normal(0, 1, (1, count, shape.hidden_size)).astype(np.float16)
        norm = RANDOM.normal(1, 0.2, shape.hidden_size).astype(np.float16)
        given, out = (bench.tensor(x), bench.tensor(norm)), bench.empty(x.shape, "float16")
        micros = bench.microseconds([lambda: function(*given, out)] * 20)  # noqa: B023
        wanted = x.astype(np.float32)
        wanted *= norm / np.sqrt(np.mean(wanted * wanted, -1, keepdims=True) + EPSILON)
        print(f"norm of {count:4} {micros:7.2f} us  error {error(out.numpy(), arrange(wanted)):.1e}", flush=True)
    print(flush=True)


class Product(nn.Module):
    """Build one product of tensor expressions, which dlight schedules."""

    def __init__(self, outputs: int, inputs: int, gate: bool) -> None:
        self.layer, self.gate = model.Linear(cuda.Kernels(), outputs, inputs), gate

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map [1, S, inputs] to [1, S, outputs]."""

        def multiply(x: te.Tensor, weight: te.Tensor, scale: te.Tensor) -> te.Tensor:
            shape = (self.layer.outputs, self.layer.inputs)
            matrix = te.compute(shape, lambda n, k: cuda.dequantize(weight, scale, n, k), name="dequantize")
            k = te.reduce_axis((0, self.layer.inputs), name="k")
            product = te.compute(
                (*x.shape[:2], self.layer.outputs),
                lambda b, s, n: te.sum(x[b, s, k].astype("float32") * matrix[n, k].astype("float32"), axis=k),
                name="matmul",
            )
            return te.compute(product.shape, lambda *i: product[i].astype(cuda.DTYPE), name="cast")

        out = op.tensor_expr_op(multiply, "linear", [x, self.layer.q_weight, self.layer.q_scale])
        if not self.gate:
            return out
        gate, up = op.split(out, 2, axis=-1)
        return op.silu(gate) * up


def plain_product(bench: Bench, outputs: int, inputs: int, gate: bool) -> VirtualMachine:
    """Build dlight's kernels of a product."""
    made = Product(outputs, inputs, gate)
    given = {"x": spec.Tensor([1, "S", inputs], "float16"), "$": {"param_mode": "plain"}}
    module = made.export_tvm(spec=nn.spec.ModuleSpec.from_raw({"forward": given}, made))[0]
    with bench.target:
        passes = library.cuda_passes(bench.target)
        return VirtualMachine(tvm.compile(module, bench.target, relax_pipeline=passes), bench.device)
