"""Perplexity: exp of the negative log-likelihood (NLL, in nats) of the scored tokens, divided by their number or by
that of words."""

import math

import numpy as np

from quantmill.metrics import bootstrap

LARGEST = 709  # nats, of which exp is a float64


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities of logits [positions, vocab], in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def nll(log_probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Negative log-likelihood [positions], in nats, of one target id a position of [positions, vocab]."""
    return -log_probabilities[np.arange(len(targets)), targets]


def perplexity(nll: np.ndarray, counts: np.ndarray) -> float:
    """exp(total NLL / total count), from sums a window: NLL and counts (of tokens or words) have shape [windows].

    Raises `OverflowError` where float64 does not hold it: a text that hardly has words, or a model that knows nothing.
    """
    nats = nll.sum() / counts.sum()
    if nats >= LARGEST:
        raise OverflowError(
            f"perplexity is exp({nats:.0f}), no number; a text without spaces has no perplexity of words"
        )
    return math.exp(nats)


def normalise(nll_a_token: float, tokens: int, words: int, size: int) -> dict[str, float | None]:
    """Every usual figure from one: NLL a token, and the tokens, words and bytes of the whole text.

    Where a protocol leaves tokens out (a tail, first halves), those count as if they were like the others. None is what
    float64 does not hold: perplexity of words in a text that hardly has spaces.
    """
    total = nll_a_token * tokens
    nats = {"token": nll_a_token, "word": total / words, "byte": total / size}
    return {
        **{f"{unit}_perplexity": math.exp(each) if each < LARGEST else None for unit, each in nats.items()},
        "bits_per_byte": total / size / math.log(2),
    }


def standard_error(nll: np.ndarray) -> float:
    """Standard error of exp(mean NLL) from NLL [tokens], as if tokens were independent: what llama-perplexity prints.

    sqrt(variance / (n - 1)) times the perplexity, where the variance is the mean of squares less the squared mean.
    """
    return math.sqrt(nll.var() / (len(nll) - 1)) * math.exp(nll.mean())


def ratio_of_sums(values: np.ndarray, counts: np.ndarray, resamples: np.ndarray) -> np.ndarray:
    """Bootstrap replicates of sum(values) / sum(counts): resamples [B, n] holds indices into the n windows."""
    return values[resamples].sum(axis=1) / counts[resamples].sum(axis=1)


def paired_difference(
    candidate: np.ndarray, reference: np.ndarray, counts: np.ndarray
) -> tuple[float, float, float, bool]:
    """(total NLL of the candidate - that of the reference) / total count, its 95% interval, and whether that holds 0.

    All three [windows], of the same windows. The same resamples are drawn for both, so that what makes a window hard
    for either cancels.
    """
    difference = candidate - reference
    replicates = ratio_of_sums(difference, counts, bootstrap.indices(len(counts)))
    low, high = bootstrap.interval(replicates, len(counts))
    return float(difference.sum() / counts.sum()), low, high, low <= 0 <= high
