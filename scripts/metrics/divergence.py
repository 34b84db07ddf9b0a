"""How far a candidate's next-token distribution is from the reference's, position by position.

Perplexity can stay where it is while answers change; divergence follows the change ("Accuracy is Not All You Need",
arXiv 2407.09141).
"""

import numpy as np


def kl_divergence(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """D(reference || candidate) in nats for log-probabilities [positions, vocab]; shape [positions].

    Rounding may leave a true zero slightly negative; such values are returned as they are, so that means stay unbiased.
    """
    return (np.exp(reference) * (reference - candidate)).sum(axis=-1)


def top1_agreement(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Whether both put the same token first, for [positions, vocab]; shape [positions]."""
    return reference.argmax(axis=-1) == candidate.argmax(axis=-1)


def summary(kld: np.ndarray) -> dict[str, float]:
    """Mean, median, p99, p99.9 and maximum over positions, in nats: the mean alone hides the rare bad token."""
    median, p99, p999 = np.quantile(kld, [0.5, 0.99, 0.999])
    return {
        "kld_mean": float(kld.mean()),
        "kld_median": float(median),
        "kld_p99": float(p99),
        "kld_p999": float(p999),
        "kld_max": float(kld.max()),
    }
