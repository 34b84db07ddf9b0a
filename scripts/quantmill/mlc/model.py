"""The decoder of all devices, which differ in kernels and key-value cache."""

from abc import ABC, abstractmethod
from typing import Protocol

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, spec

from quantmill.mlc.architecture import Architecture


class Kernels(ABC):
    """A device's operations on activations [1, S, width]."""

    @abstractmethod
    def weight_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a quantized matrix's words and scales."""

    def row_size(self, outputs: int) -> int:
        """Elements of a product's row."""
        return outputs

    @abstractmethod
    def embed(self, tokens: Tensor, table: "Linear") -> Tensor:
        """Rows of a quantized matrix for tokens [1, S]."""

    @abstractmethod
    def linear(self, x: Tensor, layer: "Linear", norm: "RMSNorm | None" = None, add: Tensor | None = None) -> Tensor:
        """Multiply x, normed if there is a norm, by a matrix, and add its bias or `add`."""

    @abstractmethod
    def swiglu(self, x: Tensor, layer: "Linear", norm: "RMSNorm") -> Tensor:
        """SiLU of the first half of a normed x times a matrix, times the second half."""


class Cache(Protocol):
    """The keys and values of the positions so far."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Append a layer's keys and values, rotated, and attend: [1, S, qkv_size] -> [1, S, heads * head_dim]."""


class Linear(nn.Module):
    """A quantized matrix [outputs, inputs], with an optional bias."""

    def __init__(self, kernels: Kernels, outputs: int, inputs: int, bias: bool = False) -> None:
        self.outputs, self.inputs = outputs, inputs
        words, scales = kernels.weight_shapes(outputs, inputs)
        self.q_weight = nn.Parameter(words, "uint32")
        self.q_scale = nn.Parameter(scales, "float16")
        self.bias = nn.Parameter((outputs,), "float16") if bias else None


class RMSNorm(nn.Module):
    """A norm with a weight, in float16 as stored."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.weight = nn.Parameter((size,), "float16")


class Attention(nn.Module):
    """Grouped queries with rotary positions."""

    def __init__(self, kernels: Kernels, shape: Architecture) -> None:
        self.kernels, self.qkv_name = kernels, shape.qkv_name
        setattr(self, self.qkv_name, Linear(kernels, shape.qkv_size, shape.hidden_size, shape.qkv_bias))
        self.o_proj = Linear(kernels, shape.hidden_size, shape.num_attention_heads * shape.head_dim)

    def forward(self, x: Tensor, norm: RMSNorm, cache: Cache, layer: int) -> Tensor:
        """Norm x [1, S, hidden_size], attend, and add x."""
        qkv = self.kernels.linear(x, getattr(self, self.qkv_name), norm)
        return self.kernels.linear(cache.attend(layer, qkv), self.o_proj, add=x)


class MLP(nn.Module):
    """The gated perceptron."""

    def __init__(self, kernels: Kernels, shape: Architecture) -> None:
        self.kernels = kernels
        self.gate_up_proj = Linear(kernels, 2 * shape.intermediate_size, shape.hidden_size)
        self.down_proj = Linear(kernels, shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Norm x [1, S, hidden_size], apply the perceptron, and add x."""
        return self.kernels.linear(self.kernels.swiglu(x, self.gate_up_proj, norm), self.down_proj, add=x)


class Layer(nn.Module):
    """Attention and perceptron, each with a norm and a residual."""

    def __init__(self, kernels: Kernels, shape: Architecture) -> None:
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(kernels, shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(kernels, shape)

    def forward(self, x: Tensor, cache: Cache, layer: int) -> Tensor:
        """[1, S, hidden_size] -> the same."""
        x = self.self_attn(x, self.input_layernorm, cache, layer)
        return self.mlp(x, self.post_attention_layernorm)


class Body(nn.Module):
    """Everything but the head."""

    def __init__(self, kernels: Kernels, shape: Architecture) -> None:
        self.embed_tokens = Linear(kernels, shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(kernels, shape) for _ in range(shape.num_hidden_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Decoder(nn.Module):
    """The whole model; parameters are named as MLC-LLM names them.

    A device's class has the library's functions `prefill`, `decode` and `score`, each from `position` on. `token`
    [1, 1] and `position` [1] are changed in place, so that decoding takes the same arguments every time; `bias` is
    added to the logits before the largest is chosen.
    """

    def __init__(self, kernels: Kernels, shape: Architecture) -> None:
        self.kernels, self.shape = kernels, shape
        self.model = Body(kernels, shape)
        self.lm_head = None if shape.tie_word_embeddings else Linear(kernels, shape.vocab_size, shape.hidden_size)

    def hidden_states(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Run tokens [1, S] through the layers: [1, S, hidden_size], before the last norm."""
        x = self.kernels.embed(tokens, self.model.embed_tokens)
        for number, layer in enumerate(self.model.layers):
            x = layer(x, cache, number)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[1, S, hidden_size] -> [1, S, vocab_size]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return self.kernels.linear(hidden, head, self.model.norm)

    def state(self) -> dict[str, spec.Tensor]:
        """Return the last arguments of all functions: the cache."""
        raise NotImplementedError

    def get_default_spec(self) -> spec.ModuleSpec:
        """Return the functions' arguments, for the compiler."""
        tokens = {"tokens": spec.Tensor([1, "positions"], "int32")}
        token = {"token": spec.Tensor([1, 1], "int32")}
        position = {"position": spec.Tensor([1], "int32")}
        bias = {"bias": spec.Tensor([self.kernels.row_size(self.shape.vocab_size)], "float32")}
        state = self.state() | {"$": {"param_mode": "packed", "effect_mode": "none"}}
        methods = {
            "prefill": tokens | token | position | bias | state,
            "decode": token | position | bias | state,
            "score": tokens | position | state,
        }
        return spec.ModuleSpec.from_raw(methods, self)
