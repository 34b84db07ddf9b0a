"""The model for a GPU: tensor expressions that TVM's dlight schedules, float16, and TVM's paged key-value cache."""

from typing import Any

from tvm import relax, te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op, spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache
from tvm.target import Target

from mlc.architecture import GROUP, Architecture
from mlc.model import Decoder, Linear

DTYPE = "float16"


def dequantize(weight: te.Tensor, scale: te.Tensor, row: Any, column: Any) -> Any:
    """One weight: its nibble less 7, times its group's scale."""
    nibble = (weight[row, column // 8] >> (column % 8 * 4).astype("uint32")) & tirx.const(15, "uint32")
    return (nibble.astype(DTYPE) - tirx.const(7, DTYPE)) * scale[row, column // GROUP]


class Kernels:
    """See `mlc.model.Kernels`."""

    def weight_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (outputs, inputs // 8), (outputs, inputs // GROUP)

    def embed(self, tokens: Tensor, table: Linear) -> Tensor:
        def take(tokens: te.Tensor, weight: te.Tensor, scale: te.Tensor) -> te.Tensor:
            shape = (*tokens.shape, table.inputs)
            return te.compute(shape, lambda b, s, k: dequantize(weight, scale, tokens[b, s], k), name="embed")

        return op.tensor_expr_op(take, "embed", [tokens, table.q_weight, table.q_scale])

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        def multiply(x: te.Tensor, weight: te.Tensor, scale: te.Tensor) -> te.Tensor:
            shape = (layer.outputs, layer.inputs)
            matrix = te.compute(shape, lambda n, k: dequantize(weight, scale, n, k), name="dequantize")
            k = te.reduce_axis((0, layer.inputs), name="k")
            product = te.compute(
                (*x.shape[:2], layer.outputs),
                lambda b, s, n: te.sum(x[b, s, k].astype("float32") * matrix[n, k].astype("float32"), axis=k),
                name="matmul",
            )
            return te.compute(product.shape, lambda *i: product[i].astype(DTYPE), name="cast")

        return op.tensor_expr_op(multiply, "linear", [x, layer.q_weight, layer.q_scale])

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return op.rms_norm(x, weight, axes=-1, epsilon=epsilon)

    def silu_multiply(self, x: Tensor) -> Tensor:
        gate, up = op.split(x, 2, axis=-1)
        return op.silu(gate) * up


class Cache:
    """See `mlc.model.Cache`."""

    def __init__(self, shape: Architecture, pages: PagedKVCache) -> None:
        self.shape, self.pages = shape, pages

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        heads, size = self.shape.num_attention_heads, self.shape.head_dim
        all_heads = heads + 2 * self.shape.num_key_value_heads
        split = op.reshape(qkv, (*qkv.shape[:2], all_heads, size))
        out = self.pages.attention_with_fused_qkv(layer, split, heads, sm_scale=size**-0.5)
        return op.reshape(out, (*qkv.shape[:2], heads * size))


class Model(Decoder):
    """What the library offers: `create_cache`, and `prefill`, `decode` and `score` on it."""

    def __init__(self, shape: Architecture, target: Target) -> None:
        super().__init__(Kernels(), shape)
        self.shape, self.target = shape, target

    def _choose(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """The token [1, 1] of the largest logit + bias, the first of equals, by two reductions over threads."""

        def largest(logits: te.Tensor, bias: te.Tensor) -> te.Tensor:
            k = te.reduce_axis((0, self.shape.vocab_size), name="k")
            return te.compute((1, 1), lambda b, s: te.max(logits[b, s, k] + bias[k], axis=k), name="largest")

        def first(logits: te.Tensor, bias: te.Tensor, largest: te.Tensor) -> te.Tensor:
            k = te.reduce_axis((0, self.shape.vocab_size), name="k")
            none = tirx.const(self.shape.vocab_size - 1, "int32")

            def place(b: Any, s: Any) -> Any:
                equal = logits[b, s, k] + bias[k] >= largest[b, s]
                return te.min(tirx.Select(equal, k.astype("int32"), none), axis=k)

            return te.compute((1, 1), place, name="first")

        logits = self.logits(hidden)
        most = op.tensor_expr_op(largest, "largest", [logits, bias])
        return op.tensor_expr_op(first, "first", [logits, bias, most])

    def prefill(self, tokens: Tensor, bias: Tensor, cache: PagedKVCache) -> Tensor:
        """Read tokens [1, S] and choose the next one."""

        def last(x: te.Tensor) -> te.Tensor:
            return te.compute((1, 1, x.shape[2]), lambda b, _, k: x[b, x.shape[1] - 1, k], name="last")

        hidden = self.hidden(tokens, Cache(self.shape, cache))
        return self._choose(op.tensor_expr_op(last, "last", [hidden]), bias)

    def decode(self, token: Tensor, bias: Tensor, cache: PagedKVCache) -> Tensor:
        """Read `token` [1, 1] and choose the next one."""
        return self._choose(self.hidden(token, Cache(self.shape, cache)), bias)

    def score(self, tokens: Tensor, cache: PagedKVCache) -> Tensor:
        """Logits [1, S, vocab_size] of tokens [1, S]."""
        return self.logits(self.hidden(tokens, Cache(self.shape, cache)))

    def create_cache(self, positions: tirx.Var, chunk: tirx.Var, page: tirx.Var) -> PagedKVCache:
        """A cache of one sequence of up to `positions`, read by at most `chunk` at a time."""
        shape = self.shape
        scaling = {"rope_type": "llama3"} | dict(shape.rope_scaling) if shape.rope_scaling else {}
        return TIRPagedKVCache(
            attn_kind="mha",
            max_batch_size=tirx.const(1, "int64"),
            max_total_seq_len=positions,
            prefill_chunk_size=chunk,
            page_size=page,
            support_sliding_window=tirx.const(0, "int64"),
            layer_partition=relax.ShapeExpr([0, shape.num_hidden_layers]),
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            qk_head_dim=shape.head_dim,
            v_head_dim=shape.head_dim,
            mla_original_qk_head_dim=0,
            mla_original_v_head_dim=0,
            rope_mode=RopeMode.NORMAL,
            rope_scale=1,
            rope_theta=int(shape.rope_theta),
            rope_scaling=scaling,
            rope_ext_factors=relax.prim_value(0),
            rotary_dim=shape.head_dim,
            enable_disaggregation=False,
            dtype=DTYPE,
            target=self.target,
        )

    def get_default_spec(self) -> spec.ModuleSpec:
        tokens = {"tokens": spec.Tensor([1, "positions"], "int32")}
        bias = {"bias": spec.Tensor([self.shape.vocab_size], "float32")}
        cache = {"cache": spec.Object(object_type=PagedKVCache)}
        mode = {"$": {"param_mode": "packed", "effect_mode": "none"}}
        methods = {
            "prefill": tokens | bias | cache | mode,
            "decode": {"token": spec.Tensor([1, 1], "int32")} | bias | cache | mode,
            "score": tokens | cache | mode,
            "create_cache": {"positions": int, "chunk": int, "page": int}
            | {"$": {"param_mode": "none", "effect_mode": "none"}},
        }
        return nn.spec.ModuleSpec.from_raw(methods, self)
