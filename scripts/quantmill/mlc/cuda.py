"""The model for a GPU, float16, and one contiguous key-value cache for one sequence.

Products with one position are cuda_matrices.py's, with many cuda_products.py's. The input of those is arranged as the
kernel reads it, by the norm, attention or gate before it.
"""

from dataclasses import dataclass
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op, spec

from quantmill.mlc import cuda_attention, cuda_matrices, cuda_products, cuda_vectors, model
from quantmill.mlc.architecture import Architecture
from quantmill.mlc.cuda_kernel import call
from quantmill.mlc.cuda_products import Epilogue
from quantmill.mlc.model import Decoder, Linear, RMSNorm
from quantmill.mlc.quantize import GROUP

DTYPE = "float16"


def dequantize(weight: te.Tensor, scale: te.Tensor, row: Any, column: Any) -> Any:
    """Return one weight: its nibble less 7, times its group's scale."""
    nibble = (weight[row, column // 8] >> (column % 8 * 4).astype("uint32")) & tirx.const(15, "uint32")
    return (nibble.astype(DTYPE) - tirx.const(7, DTYPE)) * scale[row, column // GROUP]


def _is_one(x: Tensor) -> bool:
    return isinstance(x.shape[1], int)  # else symbolic


class Kernels(model.Kernels):
    """See `mlc.model.Kernels`. Many positions without a norm are arranged (`mlc.cuda_products`)."""

    def __init__(self, warpgroups: bool = False) -> None:
        self.blocks = cuda_products.WARPGROUP_BLOCKS if warpgroups else cuda_products.BLOCKS

    def weight_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (outputs, inputs // 8), (outputs, inputs // GROUP)

    def embed(self, tokens: Tensor, table: Linear) -> Tensor:
        def take(tokens: te.Tensor, weight: te.Tensor, scale: te.Tensor) -> te.Tensor:
            shape = (*tokens.shape, table.inputs)
            return te.compute(shape, lambda b, s, k: dequantize(weight, scale, tokens[b, s], k), name="embed")

        return op.tensor_expr_op(take, "embed", [tokens, table.q_weight, table.q_scale])

    def linear(self, x: Tensor, layer: Linear, norm: RMSNorm | None = None, add: Tensor | None = None) -> Tensor:
        assert layer.bias is None or add is None
        if _is_one(x):
            return self._vector(x, layer, norm, layer.bias if add is None else add)
        if layer.bias is not None:
            return self._product(x, layer, norm, "BIAS", layer.bias)
        return self._product(x, layer, norm, "PLAIN" if add is None else "RESIDUAL", add)

    def swiglu(self, x: Tensor, layer: Linear, norm: RMSNorm) -> Tensor:
        return self._vector(x, layer, norm, gate=True) if _is_one(x) else self._product(x, layer, norm, "GATE")

    def _product(
        self, x: Tensor, layer: Linear, norm: RMSNorm | None, epilogue: Epilogue, add: Tensor | None = None
    ) -> Tensor:
        if norm is not None:
            kernel = cuda_products.rms_norm(layer.inputs, norm.epsilon)
            x = call("rms_norm", kernel, [x, norm.weight], [Tensor.placeholder(x.shape, DTYPE)])
        kernel = cuda_products.product(layer.outputs, layer.inputs, epilogue, self.blocks)
        given = [x, layer.q_weight, layer.q_scale, add]
        out = Tensor.placeholder((*x.shape[:2], layer.outputs // (2 if epilogue == "GATE" else 1)), DTYPE)
        return call("product", kernel, [tensor for tensor in given if tensor is not None], [out])

    def _vector(
        self, x: Tensor, layer: Linear, norm: RMSNorm | None, add: Tensor | None = None, gate: bool = False
    ) -> Tensor:
        launch = cuda_matrices.choose_launch(layer.inputs)
        epsilon = None if norm is None else norm.epsilon
        added = None if add is None else tuple(add.shape)
        kernel = cuda_matrices.matrix_vector(layer.outputs, layer.inputs, launch, epsilon=epsilon, add=added, gate=gate)
        given = [x, layer.q_weight, layer.q_scale, None if norm is None else norm.weight, add]
        out = Tensor.placeholder((1, 1, layer.outputs // 2 if gate else layer.outputs), DTYPE)
        return call("matrix_vector", kernel, [tensor for tensor in given if tensor is not None], [out])


@dataclass
class Cache:
    """See `mlc.model.Cache`: keys and values [layers, kv_heads, C, head_dim]."""

    shape: Architecture
    position: Tensor
    counter: Tensor
    keys: Tensor
    values: Tensor

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        shape = self.shape
        heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        sizes = (shape.num_hidden_layers, heads, kv_heads, size)
        frequency = Tensor.from_const(shape.frequencies())
        number = tirx.IntImm("int64", layer)
        out = Tensor.placeholder((*qkv.shape[:2], heads * size), DTYPE)
        if _is_one(qkv):
            partial = Tensor.placeholder((heads, cuda_attention.splits(kv_heads), size + 2), "float32")
            arguments = [qkv, frequency, self.position, self.counter, self.keys, self.values, number]
            kernel = cuda_attention.attend_one(*sizes)
            results = call("attend_one", kernel, arguments, [partial, out], [3, 4, 5])
            self.counter, self.keys, self.values, _, out = results
            return out
        arguments = [qkv, frequency, self.position, self.keys, self.values, number]
        self.keys, self.values, queries = call("append", cuda_attention.append(*sizes), arguments, [out], [3, 4])
        arguments = [queries, self.position, self.keys, self.values, number]
        return call("attend_many", cuda_attention.attend_many(*sizes), arguments, [out])


class Model(Decoder):
    """See `mlc.model.Decoder`. `counter` [kv_heads] holds zeros.

    `warpgroups`: the GPU has instructions for four warps, and the shared memory that these need (sm_90a).
    """

    def __init__(self, shape: Architecture, warpgroups: bool = False) -> None:
        super().__init__(Kernels(warpgroups), shape)

    def _choose(self, hidden: Tensor, bias: Tensor, count: Any, token: Tensor, position: Tensor) -> Tensor:
        kernel = cuda_vectors.choose(self.shape.vocab_size)
        arguments = [self.logits(hidden), bias, token, position, count]
        return call("choose", kernel, arguments, [], [2, 3])[0]

    def prefill(
        self,
        tokens: Tensor,
        token: Tensor,
        position: Tensor,
        bias: Tensor,
        counter: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Read tokens [1, S] and choose the next one."""

        def last(x: te.Tensor) -> te.Tensor:
            return te.compute((1, 1, x.shape[2]), lambda b, _, k: x[b, x.shape[1] - 1, k], name="last")

        hidden = self.hidden_states(tokens, Cache(self.shape, position, counter, keys, values))
        return self._choose(op.tensor_expr_op(last, "last", [hidden]), bias, tokens.shape[1], token, position)

    def decode(
        self, token: Tensor, position: Tensor, bias: Tensor, counter: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Read `token` and choose the next one."""
        hidden = self.hidden_states(token, Cache(self.shape, position, counter, keys, values))
        return self._choose(hidden, bias, tirx.IntImm("int64", 1), token, position)

    def score(self, tokens: Tensor, position: Tensor, counter: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Float32 logits [1, S, vocab_size] of tokens [1, S]; `position` stays."""
        hidden = self.hidden_states(tokens, Cache(self.shape, position, counter, keys, values))
        return self.logits(hidden).astype("float32")

    def state(self) -> dict[str, spec.Tensor]:
        shape = self.shape
        size = [shape.num_hidden_layers, shape.num_key_value_heads, "capacity", shape.head_dim]
        counter = {"counter": spec.Tensor([shape.num_key_value_heads], "int32")}
        return counter | {name: spec.Tensor(size, DTYPE) for name in ("keys", "values")}
