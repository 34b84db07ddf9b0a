"""The model for a CPU: Quantmill's kernels, float32, and one contiguous key-value cache for one sequence.

TVM's paged cache serves many sequences; its CPU kernels are scalar loops, and its bookkeeping alone costs a small
model more than the step itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.relax.frontend.nn import Tensor, op, spec

from quantmill.mlc import cpu_attention, cpu_matrices, cpu_vectors, model
from quantmill.mlc.architecture import Architecture
from quantmill.mlc.cpu_layout import LANES, padded_rows
from quantmill.mlc.model import Decoder, Linear, RMSNorm
from quantmill.mlc.quantize import GROUP


class Kernels(model.Kernels):
    """See `mlc.model.Kernels`. Kernels differ for one position and many."""

    def weight_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        blocks = padded_rows(outputs) // LANES
        return (blocks, inputs // 8, LANES), (blocks, inputs // GROUP, LANES)

    def row_size(self, outputs: int) -> int:
        return padded_rows(outputs)

    def embed(self, tokens: Tensor, table: Linear) -> Tensor:
        kernel = cpu_matrices.embed(padded_rows(table.outputs), table.inputs)
        return _call(kernel, "embed", [tokens, table.q_weight, table.q_scale], (*tokens.shape, table.inputs))

    def product(self, x: Tensor, layer: Linear) -> Tensor:
        """Multiply x by a quantized matrix."""
        outputs = padded_rows(layer.outputs)
        make = cpu_matrices.matrix_matrix if _is_many(x) else cpu_matrices.matrix_vector
        arguments = [x, layer.q_weight, layer.q_scale]
        return _call(make(outputs, layer.inputs), make.__name__, arguments, (*x.shape[:2], outputs))

    def rms_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Divide x by its root mean square, and multiply by the norm's weight."""
        return _call(cpu_vectors.rms_norm(x.shape[2], norm.epsilon, _is_many(x)), "rms_norm", [x, norm.weight], x.shape)

    def silu_multiply(self, x: Tensor) -> Tensor:
        """SiLU of the first half of the last axis, times the second."""
        size = x.shape[2] // 2
        return _call(cpu_vectors.silu_multiply(size, _is_many(x)), "silu_multiply", [x], (*x.shape[:2], size))

    def linear(self, x: Tensor, layer: Linear, norm: RMSNorm | None = None, add: Tensor | None = None) -> Tensor:
        out = self.product(x if norm is None else self.rms_norm(x, norm), layer)
        if layer.bias is not None:
            out = out + layer.bias.astype(out.dtype)
        return out if add is None else add + out

    def swiglu(self, x: Tensor, layer: Linear, norm: RMSNorm) -> Tensor:
        return self.silu_multiply(self.linear(x, layer, norm))


def _is_many(x: Tensor) -> bool:
    return not isinstance(x.shape[1], int)  # symbolic


def _call(kernel: Any, name: str, arguments: list[Tensor], shape: Any, dtype: str = "float32") -> Tensor:
    return op.tensor_ir_op(kernel, name, arguments, Tensor.placeholder(shape, dtype))


@dataclass
class Cache:
    """See `mlc.model.Cache`: keys [layers, kv_heads, head_dim, C], values [layers, kv_heads, C, head_dim]."""

    shape: Architecture
    cosine: Tensor
    sine: Tensor
    position: Tensor
    keys: Tensor
    values: Tensor

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        shape = self.shape
        kernel = cpu_attention.attention(
            shape.num_hidden_layers, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, _is_many(qkv)
        )
        number = Tensor.from_const(np.array([layer], np.int32))
        width = shape.num_attention_heads * shape.head_dim
        out = Tensor.placeholder((*qkv.shape[:2], width), "float32")
        arguments = [qkv, self.cosine, self.sine, self.position, number, self.keys, self.values]
        result = op.tensor_ir_inplace_op(kernel, "attention", arguments, [5, 6, -1], [self.keys, self.values, out])
        self.keys, self.values, out = result
        return out


class Model(Decoder):
    """See `mlc.model.Decoder`."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__(Kernels(), shape)

    def _cache(self, tokens: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Cache:
        half = self.shape.head_dim // 2
        kernel = cpu_attention.rotations(half)
        outputs = [Tensor.placeholder((tokens.shape[1], half), "float32") for _ in range(2)]
        frequency = Tensor.from_const(self.shape.frequencies())
        cosine, sine = op.tensor_ir_op(kernel, "rotations", [position, frequency], outputs)
        return Cache(self.shape, cosine, sine, position, keys, values)

    def _choose(self, hidden: Tensor, bias: Tensor, tokens: Tensor, token: Tensor, position: Tensor) -> Tensor:
        kernel = cpu_vectors.choose(padded_rows(self.shape.vocab_size))
        arguments = [self.logits(hidden), bias, tokens, token, position]
        return op.tensor_ir_inplace_op(kernel, "choose", arguments, [3, 4], [token, position])[0]

    def prefill(
        self, tokens: Tensor, token: Tensor, position: Tensor, bias: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Read tokens [1, S] and choose the next one."""
        hidden = self.hidden_states(tokens, self._cache(tokens, position, keys, values))
        last = _call(
            cpu_vectors.last_position(self.shape.hidden_size), "last", [hidden], (1, 1, self.shape.hidden_size)
        )
        return self._choose(last, bias, tokens, token, position)

    def decode(self, token: Tensor, position: Tensor, bias: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Read `token` and choose the next one."""
        hidden = self.hidden_states(token, self._cache(token, position, keys, values))
        return self._choose(hidden, bias, token, token, position)

    def score(self, tokens: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Logits [1, S, padded vocabulary] of tokens [1, S]; `position` stays."""
        return self.logits(self.hidden_states(tokens, self._cache(tokens, position, keys, values)))

    def state(self) -> dict[str, spec.Tensor]:
        heads, size = (self.shape.num_hidden_layers, self.shape.num_key_value_heads), self.shape.head_dim
        return {
            "keys": spec.Tensor([*heads, size, "capacity"], "float32"),
            "values": spec.Tensor([*heads, "capacity", size], "float32"),
        }
