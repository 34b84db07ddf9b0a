"""Comparison of an engine's predictions with transformers', from the same weights.

The weights are the source's, or the artifact's as quantmill.layouts reads them. Of some positions, the likeliest tokens
and the probability left for all others are kept. Divergence is taken over these outcomes in both directions: an engine
that predicts better than its weights is as wrong as one that predicts worse.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from quantmill.common.program import UserError
from quantmill.engines import Engine
from quantmill.metrics import perplexity
from quantmill.quality import teacher_forcing

WINDOWS = 2  # of the evaluation text, of whose positions some are compared
PLACES = 256  # positions of each window, evenly spread
TOP = 32  # likeliest tokens of a position; the others count as one
ROWS = 16  # positions whose float64 log-probabilities exist at a time
LEAST = 1e-30  # a probability, so that it has a logarithm
# Mean divergence in nats that rounding explains, by what an engine calculates in; docs/METHODS.md has what was measured
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3, "int8": 1e-3}
# An engine that rounds activations to few bits may be this many times as far off as transformers with the same
# rounding: after some layers two programs round differently
ROUNDINGS = 2


class Predictions:
    """An engine's predictions over a text: its perplexity, and log-probabilities at `places`, numbers of scored
    positions."""

    def __init__(self, engine: Engine, text: teacher_forcing.Text, expected: Mapping[str, Any] | None = None) -> None:
        """Score the text. `ids`, `log_p` [places, TOP] and `log_rest` [places] are of the likeliest tokens, or of those
        that `expected` names; `nll` [scored positions].

        Raises `UserError` where logits are not finite or too few.
        """
        self.places = places(text)
        rows = {place: row for row, place in enumerate(self.places)}
        ids, log_p, nll = [], [], []
        first = 0
        for chunk in teacher_forcing.chunks(engine, text):
            for low in range(0, len(chunk.targets), ROWS):
                scores = perplexity.log_softmax(teacher_forcing.to_host(chunk.logits[low : low + ROWS]))
                nll.append(perplexity.nll(scores, chunk.targets[low : low + ROWS]))
                for offset, row in ((place, rows.get(first + place)) for place in range(len(scores))):
                    if row is not None:
                        tokens = expected["ids"][row] if expected else np.argsort(-scores[offset])[:TOP]
                        ids.append(np.asarray(tokens))
                        log_p.append(scores[offset][ids[-1]])
                first += len(scores)
            del chunk  # or it would still be held while the engine makes the next one
        self.ids, self.log_p, self.nll = np.array(ids), np.array(log_p), np.concatenate(nll)
        self.log_rest = np.log(np.maximum(1 - np.exp(self.log_p).sum(axis=1), LEAST))
        self.perplexity = float(np.exp(self.nll.mean()))

    def as_json(self) -> dict[str, Any]:
        """Return what `divergence` needs, for a JSON file."""
        return {"places": self.places, "ids": self.ids.tolist(), "log_p": self.log_p.tolist()}


def places(text: teacher_forcing.Text) -> list[int]:
    """List the scored positions that are compared: `PLACES` of each of the first windows, with both ends."""
    found, first = [], 0
    for window in text.windows[:WINDOWS]:
        scored = window.last - window.first
        found += [first + place for place in np.unique(np.linspace(0, scored - 1, PLACES).astype(int)).tolist()]
        first += scored
    return found


def count_positions(text: teacher_forcing.Text) -> int:
    """Count the scored positions of the windows that are compared."""
    return sum(window.last - window.first for window in text.windows[:WINDOWS])


def divergence(expected: Mapping[str, Any], found: Predictions) -> np.ndarray:
    """KL divergence in nats [places], the larger of both directions, over the likeliest tokens and the rest."""
    log_p, log_q = np.array(expected["log_p"]), found.log_p
    log_p = np.column_stack([log_p, np.log(np.maximum(1 - np.exp(log_p).sum(axis=1), LEAST))])
    log_q = np.column_stack([log_q, found.log_rest])
    either = [(np.exp(one) * (one - other)).sum(axis=1) for one, other in ((log_p, log_q), (log_q, log_p))]
    return np.maximum(*either)


def tolerance(compute_type: str, other: str, rounding: float) -> float:
    """Mean divergence that rounding explains, by the types in which the engine and transformers calculate, such as
    `float16` or `int8_float32`.

    rounding: divergence in nats that rounding activations as the engine does causes in transformers; else 0.
    """
    limits = (TOLERANCES.get(each.partition("_")[0], TOLERANCES["bfloat16"]) for each in (compute_type, other))
    return max(*limits, ROUNDINGS * rounding)


def check(
    expected: Mapping[str, Any], found: Predictions, text: teacher_forcing.Text, compute_type: str
) -> dict[str, float | str]:
    """Compare an engine's predictions with those `expected` of the same weights.

    Return the mean divergence and its tolerance. Raises `UserError` if it is beyond, with the first wrong position and
    both perplexities.
    """
    if expected["places"] != found.places:
        raise UserError("the expected predictions are of other positions; delete expected.json and build again")
    each = divergence(expected, found)
    limit = tolerance(compute_type, expected["compute_type"], expected.get("rounding", 0))
    if each.mean() <= limit:
        return {"divergence": float(each.mean()), "tolerance": limit, "against": expected["against"]}
    ours, due = float(np.exp(found.nll[: count_positions(text)].mean())), expected["compared_perplexity"]
    raise UserError(
        f"the engine does not calculate what the weights say: {each.mean():.3g} nats from transformers on "
        f"{expected['against']}, where rounding in {compute_type} explains {limit:g} ({extent(each > limit, text)}; "
        f"perplexity {ours:.4g}, due {due:.4g})"
    )


def extent(beyond: np.ndarray, text: teacher_forcing.Text) -> str:
    """Say in words which of the compared positions are wrong: all, or from one of a window on."""
    wrong, firsts, start = np.array(places(text))[beyond], [], 0
    for window in text.windows[:WINDOWS]:
        end = start + window.last - window.first
        inside = wrong[(start <= wrong) & (wrong < end)]
        if len(inside):
            firsts.append(window.first - window.start + int(inside[0]) - start)
        start = end
    if not firsts:
        return "a little at many positions"
    return f"from position {min(firsts)} of a window on"
