"""Rotary positions: the frequency of each pair of a head's dimensions."""

import math

import numpy as np

from quantmill.mlc.architecture import Architecture


def frequencies(shape: Architecture) -> np.ndarray:
    """Radians a position, float32 [head_dim / 2].

    theta**(-2i / head_dim); Llama 3 divides those of waves longer than a part of its first context, with a smooth step
    between (transformers, modeling_rope_utils).
    """
    plain = shape.rope_theta ** (-np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim)
    if not shape.rope_scaling:
        return plain.astype(np.float32)
    scaling = dict(shape.rope_scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (plain * (smooth + (1 - smooth) / scaling["factor"])).astype(np.float32)
