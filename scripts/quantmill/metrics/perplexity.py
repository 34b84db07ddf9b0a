"""Perplexity: exp of the mean negative log-likelihood (NLL, in nats) per scored token, or per word."""

import math

import numpy as np

from quantmill.metrics import bootstrap

LARGEST = 709  # nats whose exp is a float64


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the natural log-probabilities of logits [positions, vocab], in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def nll(log_probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the NLL [positions] in nats of the target ids [positions] under [positions, vocab]."""
    return -log_probabilities[np.arange(len(targets)), targets]


def perplexity(nll: np.ndarray, counts: np.ndarray) -> float:
    """Return exp(total NLL / total count) from sums per window: NLL and counts of tokens or words, both [windows].

    Raises `OverflowError` beyond float64: for a text with hardly any words, or a model that knows nothing.
    """
    nats = nll.sum() / counts.sum()
    if nats >= LARGEST:
        raise OverflowError(
            f"perplexity is exp({nats:.0f}), which is too large; a text without spaces has no perplexity per word"
        )
    return math.exp(nats)


def normalise(nll_a_token: float, tokens: int, words: int, size: int) -> dict[str, float | None]:
    """Return perplexities per token, word and byte, from the NLL per token and the text's tokens, words and bytes.

    Tokens that a protocol does not score (a tail, first halves) count like the others. A perplexity beyond float64 is
    None, for example per word in a text with hardly any spaces.
    """
    total = nll_a_token * tokens
    nats = {"token": nll_a_token, "word": total / words, "byte": total / size}
    return {
        **{f"{unit}_perplexity": math.exp(each) if each < LARGEST else None for unit, each in nats.items()},
        "bits_per_byte": total / size / math.log(2),
    }


def standard_error(nll: np.ndarray) -> float:
    """Return the standard error of exp(mean NLL) from NLL [tokens], with independent tokens, as in llama-perplexity.

    It is sqrt(variance / (n - 1)) times the perplexity; the variance is the mean square minus the squared mean.
    """
    return math.sqrt(nll.var() / (len(nll) - 1)) * math.exp(nll.mean())


def ratio_of_sums(values: np.ndarray, counts: np.ndarray, resamples: np.ndarray) -> np.ndarray:
    """Return bootstrap replicates [B] of sum(values) / sum(counts); resamples [B, n] are indices of the n windows."""
    return values[resamples].sum(axis=1) / counts[resamples].sum(axis=1)


def paired_difference(
    candidate: np.ndarray, reference: np.ndarray, counts: np.ndarray
) -> tuple[float, float, float, bool]:
    """Return (NLL of the candidate - NLL of the reference) / count, its 95% interval, and whether that contains 0.

    All arguments are [windows], of the same windows. Both are resampled alike, so that the difficulty of a window
    cancels.
    """
    difference = candidate - reference
    replicates = ratio_of_sums(difference, counts, bootstrap.indices(len(counts)))
    low, high = bootstrap.interval(replicates, len(counts))
    return float(difference.sum() / counts.sum()), low, high, low <= 0 <= high
