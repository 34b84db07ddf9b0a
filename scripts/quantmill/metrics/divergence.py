"""Divergence of a candidate's next-token distributions from the reference's, position by position.

Perplexity can stay the same while answers change; divergence follows the change ("Accuracy is Not All You Need",
arXiv 2407.09141).
"""

from types import ModuleType
from typing import Any

import numpy as np

FIGURES = ("kld_mean", "kld_median", "kld_p99", "kld_p999", "kld_max", "delta_p_rms", "top1_agreement")


def measure(
    candidate: Any, reference: Any, targets: Any, xp: ModuleType = np, work: Any | None = None
) -> dict[str, Any]:
    """Compare two models' logits [positions, vocab] at the target ids [positions]; return values per position.

    nll: of the target under the candidate, in nats.
    kld: D(reference || candidate) over the whole vocabulary, in nats. Rounding may make a true zero slightly negative;
        such values are kept, so that means stay unbiased.
    delta_p: the target's probability under the candidate minus that under the reference.
    top1: both models' likeliest tokens are equal.

    Exponentials and differences are float32, as the logits are: of equal logits kld is 0, and else it is off by about
    1e-8 nats, at random, and by 1e-7 on a GPU, which sums in float32. A frequent caller passes few positions and the
    same `work`, because new arrays of a megabyte are new pages, which take longer than the arithmetic.

    Args:
        xp: numpy, or torch if `candidate` is a tensor; the computation is on its device.
        work: buffer of float32 [3, at least as many positions, vocab].
    """

    def total(values: Any) -> Any:  # torch would copy all values to float64 first
        return values.sum(axis=-1, dtype=np.float64) if xp is np else values.sum(-1).double()

    device = candidate.device
    rows = xp.arange(len(targets), device=device)
    reference = xp.asarray(reference, device=device)
    if work is None:
        work = xp.empty((3, *candidate.shape), dtype=xp.float32, device=device)
    q, p, weights = work[:, : len(targets)]
    likeliest = candidate.argmax(axis=-1), reference.argmax(axis=-1)
    largest = candidate[rows, likeliest[0]], reference[rows, likeliest[1]]
    xp.subtract(candidate, largest[0][:, None], out=q)
    xp.subtract(reference, largest[1][:, None], out=p)
    xp.exp(q, out=weights)
    q_log_sum = xp.log(total(weights))
    xp.exp(p, out=weights)
    p_sum = total(weights)
    p_log_sum = xp.log(p_sum)
    p -= q
    p *= weights
    cross = total(p)
    # in float64, which does not round the difference
    nll = q_log_sum + (largest[0] - xp.asarray(candidate[rows, targets], dtype=xp.float64))
    expected = p_log_sum + (largest[1] - xp.asarray(reference[rows, targets], dtype=xp.float64))
    return {
        "nll": nll,
        "kld": cross / p_sum - p_log_sum + q_log_sum,
        "delta_p": xp.exp(-nll) - xp.exp(-expected),
        "top1": likeliest[0] == likeliest[1],
    }


def bound(
    target_logprobs: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
    reference: np.ndarray,
    targets: np.ndarray,
) -> dict[str, np.ndarray]:
    """Compare a candidate without logits with the reference; return values per position, named as in `measure`.

    These are nll and delta_p; if k > 0 also top1 and kld_lower_bound. The latter is the divergence over the top-k ids
    and all others pooled, which never exceeds the whole (data processing inequality; Cover and Thomas, 2.8).

    Args:
        target_logprobs: natural log-probabilities [positions] of the targets.
        top_ids, top_logprobs: the k likeliest ids and their log-probabilities [positions, k].
        reference: the reference's logits [positions, vocab].
    """
    p = np.asarray(reference, np.float64)
    p = np.exp(p - p.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    nll = -np.asarray(target_logprobs, np.float64)
    found = {"nll": nll, "delta_p": np.exp(-nll) - p[np.arange(len(targets)), targets]}
    if not top_ids.shape[1]:
        return found
    # ids are distinct at each position; those of a padded vocabulary are not in the reference's
    inside = top_ids < p.shape[1]
    kept = np.where(inside, np.take_along_axis(p, np.where(inside, top_ids, 0), axis=1), 0.0)
    log_q = np.asarray(top_logprobs, np.float64)
    # probabilities from float32 sum to 1 within its precision: a smaller rest is rounding, not divergence
    rest_p, rest_q = (np.maximum(1 - each.sum(axis=1), np.finfo(np.float32).eps) for each in (kept, np.exp(log_q)))
    logs = np.log(np.maximum(kept, np.finfo(np.float64).tiny))
    shared = (kept * (logs - log_q)).sum(axis=1) + rest_p * np.log(rest_p / rest_q)
    return found | {"kld_lower_bound": shared, "top1": p.argmax(axis=1) == top_ids[:, 0]}


def summary(kld: np.ndarray, delta_p: np.ndarray, top1: np.ndarray) -> dict[str, float]:
    """Summarise positions: KL divergence (nats), RMS of delta_p, and top-1 agreement.

    The mean of the divergence hides the rare bad token, so its quantiles are included.
    """
    median, p99, p999 = np.quantile(kld, [0.5, 0.99, 0.999])
    found = (kld.mean(), median, p99, p999, kld.max(), np.sqrt(np.square(delta_p).mean()), top1.mean())
    return dict(zip(FIGURES, map(float, found), strict=True))


def without_kld(positions: dict[str, np.ndarray]) -> dict[str, float | None]:
    """Return the same figures without the divergence, and its lower bound if known."""
    found: dict[str, float | None] = dict.fromkeys(FIGURES) | {"kld_lower_bound": None}
    if "delta_p" in positions:
        found["delta_p_rms"] = float(np.sqrt(np.square(positions["delta_p"]).mean()))
    if "kld_lower_bound" in positions:
        found |= {
            "kld_lower_bound": float(positions["kld_lower_bound"].mean()),
            "top1_agreement": float(positions["top1"].mean()),
        }
    return found
