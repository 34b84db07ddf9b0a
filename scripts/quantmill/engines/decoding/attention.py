"""Attention of one position in which query heads share keys and values, without copying these for every query head.

transformers' sdpa repeats key and value heads for all query heads first, because PyTorch's kernels take shared heads
only without a mask: on an H200 this makes a captured 1.1B model 5 to 8% slower (docs/PERFORMANCE.md). With one
position, the query heads that share a key head can take the place of a prompt's positions, which every kernel supports.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SHARED_HEADS = "sdpa_shared_heads"  # a model's attn_implementation


def shared_heads(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from `query` [b, heads, n, dim] to `key` and `value` [b, key heads, positions, dim]; n of 1 shares heads.

    `attention_mask` [b or 1, 1, n, positions] is added. Returns [b, n, heads, dim], and None for the weights.
    """
    batch, heads, positions, _ = query.shape
    groups = heads // key.shape[1]
    if positions != 1 or groups == 1 or attention_mask is None or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    together = query.reshape(batch, heads // groups, groups, -1)
    output = nn.functional.scaled_dot_product_attention(together, key, value, attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None


AttentionInterface.register(SHARED_HEADS, shared_heads)
AttentionMaskInterface.register(SHARED_HEADS, sdpa_mask)
