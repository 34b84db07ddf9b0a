"""Perplexity: exp of the mean negative log-likelihood (NLL, in nats) of the scored tokens.

The same float16 model is published with "WikiText perplexities" from 5.1 to 12.2; the protocol is part of the number.
"""

import math

import numpy as np

GPTQ_WINDOW = 2048


def gptq_windows(tokens: int, context: int | None) -> list[tuple[int, int]]:
    """Windows [start, stop) of the protocol `gptq-2048`, that of the GPTQ paper's code (arXiv 2210.17323).

    The text is cut into non-overlapping windows of 2048 tokens, or of the model's context where that is shorter; the
    tail that fills no window is dropped. Raises `ValueError` where the text fills none.
    """
    window = min(GPTQ_WINDOW, context or GPTQ_WINDOW)
    if tokens < window:
        raise ValueError(f"{tokens} tokens do not fill one window of {window}")
    return [(start, start + window) for start in range(0, tokens - window + 1, window)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities of logits [positions, vocab], in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def perplexity(nll: np.ndarray, tokens: np.ndarray) -> float:
    """exp(total NLL / total tokens), from sums a window: nll and tokens have shape [windows]."""
    return math.exp(nll.sum() / tokens.sum())


def ratio_of_sums(values: np.ndarray, counts: np.ndarray, resamples: np.ndarray) -> np.ndarray:
    """Bootstrap replicates of sum(values) / sum(counts): resamples [B, n] holds indices into the n windows."""
    return values[resamples].sum(axis=1) / counts[resamples].sum(axis=1)
