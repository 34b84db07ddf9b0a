"""The element-wise chains of a decode step as single kernels (torch.compile), rounded as they are apart.

Only replacements with the same bits are used: each is first tried on random numbers of one position, and what differs,
or cannot be compiled here, stays as it is. SwiGLU is not fused: compiled, its exponential rounds differently once in
thousands of numbers. Sums are not fused, because another order of summation gives another result.
"""

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
_FUSED: WeakKeyDictionary[PreTrainedModel, tuple[Write, list[str]]] = WeakKeyDictionary()  # once for each model


def write_cache(
    keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put `key` and `value` [1, heads, n, dim] into a cache [1, heads, positions, dim] at `slots` [n]."""
    keys.index_copy_(2, slots, key)
    values.index_copy_(2, slots, value)


def _square(x: torch.Tensor) -> torch.Tensor:
    return x.float().pow(2)


def _normalise(x: torch.Tensor, variance: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return weight * (x.float() * torch.rsqrt(variance + epsilon)).to(x.dtype)


def _compile(function: Callable) -> Callable:
    """Compile a function to one kernel for each shape of its arguments; every intermediate is rounded to its dtype."""
    return torch.compile(function, dynamic=False, options={"emulate_precision_casts": True})


def _same_bits(function: Callable, other: Callable, *arguments: torch.Tensor) -> bool:
    """Return whether two functions return the same bits; False where one cannot be compiled."""
    try:
        one, two = (
            result if isinstance(result, tuple) else (result,) for result in (function(*arguments), other(*arguments))
        )
    except Exception:  # no compiler, one that fails, or a function with other arguments in this model
        return False
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _norms(model: PreTrainedModel, random: Callable[..., torch.Tensor]) -> bool:
    """Fuse RMSNorm (arXiv 1910.07467) of one position around its mean, which stays as it is."""
    square, normalise = _compile(_square), _compile(_normalise)

    def one_position(module: nn.Module) -> Callable:
        original, weight, epsilon = module.forward, module.weight, module.variance_epsilon

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x.shape[-2] != 1:
                return original(x)
            return normalise(x, square(x).mean(-1, keepdim=True), weight, epsilon)

        return forward

    norms = [each for each in model.modules() if hasattr(each, "variance_epsilon") and hasattr(each, "weight")]
    if not norms:
        return False
    widest = max(norms, key=lambda module: len(module.weight))  # heads may have norms too, which stay as they are
    if not _same_bits(one_position(widest), widest.forward, random(1, 1, len(widest.weight))):
        return False
    for module in norms:
        module.forward = one_position(module)
    return True


def _rotary(model: PreTrainedModel, random: Callable[..., torch.Tensor]) -> bool:
    """Fuse the rotary embedding of one position, in the module that defines the model."""
    modeling, name = sys.modules[type(model).__module__], "apply_rotary_pos_emb"
    original = getattr(modeling, name, None)
    if original is None:
        return False
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    rotary = _compile(original)
    arguments = *(random(1, each, 1, size) for each in heads), random(1, 1, size), random(1, 1, size)
    if not _same_bits(rotary, original, *arguments):
        return False

    def embed(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return (rotary if query.shape[-2] == 1 else original)(query, *rest, **options)

    setattr(modeling, name, embed)
    return True


def fuse(model: PreTrainedModel) -> tuple[Write, list[str]]:
    """Fuse a model's norms and rotary embedding. Returns the function that writes one position to a cache, and the
    names of all fused parts."""
    if model not in _FUSED:
        _FUSED[model] = _fuse(model)
    return _FUSED[model]


def _fuse(model: PreTrainedModel) -> tuple[Write, list[str]]:
    noise = torch.Generator(model.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise, device=model.device).to(model.dtype)

    def probe(write: Callable) -> Callable:
        def cache(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = (torch.zeros(1, 2, 4, 8, dtype=model.dtype, device=model.device) for _ in range(2))
            write(keys, values, key, value, torch.tensor([3], device=model.device))
            return keys, values

        return cache

    write = _compile(write_cache)
    parts = {
        "norm": _norms(model, random),
        "rotary embedding": _rotary(model, random),
        "cache": _same_bits(probe(write), probe(write_cache), random(1, 2, 1, 8), random(1, 2, 1, 8)),
    }
    return write if parts["cache"] else write_cache, [name for name, fused in parts.items() if fused]
