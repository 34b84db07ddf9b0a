"""Checks that an engine answers for the tokens that it was given: none added, none left out, each in its place.

An engine that adds a token before the prompt, or returns every position's logits one place too late, gives plausible
answers. Short pieces of text reveal it: after few tokens one more changes the prediction most. All comparisons are by
likelihood and against the rival explanation, so that ties and rounding to few bits pass.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from quantmill.checkpoint import shards
from quantmill.common import special_tokens
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError
from quantmill.engines import Engine
from quantmill.metrics import perplexity
from quantmill.quality.teacher_forcing import to_host

PIECES = 8  # of the text, evenly spread
LENGTH = 4  # tokens of each: an added token changes the first predictions most
TOP = 16  # likeliest tokens kept of each row; the others are pooled
CLEARLY = 0.5  # a rival explanation must leave less than this share of the distance
STARTS = 8  # tokens that decoding starts from
DECODED = 4  # tokens after each
GAP = 0.1  # nats between the likeliest token and the chosen one, more than half-precision ties differ by
# nats between two tokens that half-precision sums may order either way: of logits up to 32, float16 resolves 0.016 to
# 0.03
TIE = 0.05

LATE = "its logits are shifted by one: a token's row holds what follows the token before it"
EARLY = "its logits are shifted by one: a token's row holds what follows the token after it"
ADDED = "it adds a token (a beginning of sequence?) before those that it is given"
# explanations of an engine's rows: the predictions that they would equal, and their shift; the first is the right one
EXPLANATIONS = {
    "": ("plain", 0),
    LATE: ("plain", -1),
    EARLY: ("plain", 1),
    ADDED: ("added", 1),
    f"{ADDED}, and returns that one's row too": ("added", 0),
}

Rows = dict[str, list[list[float]]]


def examine(engine: Engine, artifact: Path, ids: list[int], expected: Path | None) -> dict[str, Any]:
    """Check an engine that has loaded `artifact` against `expected`, which gate.expected wrote for the same text.

    Without it the engine is the reference, and what belongs in that file is returned. Of an engine without logits the
    targets' log-probabilities are checked, if it has them. Raises `UserError` if the engine answers for other tokens
    than it was given.
    """
    added = added_token(artifact, ids)
    reference = json.loads(expected.read_text(encoding="utf-8")).get("probes") if expected else None
    if "logits" in engine.capabilities:
        if expected:
            check_logits(engine, ids, reference)
        if not engine.no_decoding:
            check_decoding(engine, [ids], added)
        return {} if expected else {"probes": probes(engine, ids, added)}
    if "target_logprobs" in engine.capabilities:
        check_targets(engine, ids, reference)
    return {}


def texts(artifact: Path, ids: list[int], expected: Path | None) -> list[list[int]]:
    """Return the texts of which `examine` asks an engine for logits before it decodes."""
    added = added_token(artifact, ids)
    return pieces(ids) if expected else [text for piece in pieces(ids) for text in (piece, [added, *piece])]


def added_token(artifact: Path, ids: Sequence[int]) -> int:
    """Return the token that an engine would add: config.json's beginning of sequence, else the text's first id.

    A token outside the vocabulary does not count: an engine could not read it.
    """
    path = artifact / "config.json"
    config = of_text(shards.read_json(path) if path.exists() else {})
    return next(iter(special_tokens.select(config.get("bos_token_id"), config.get("vocab_size"))), ids[0])


def chunks(engine: Engine, ids: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield chunks of logits [n, vocab] with the place in `ids` of their first row. Raises `UserError` unless there is
    one finite row for each id."""
    done = 0
    for chunk in engine.logits(ids):
        logits = to_host(chunk)
        if not np.isfinite(logits).all():
            raise UserError("the engine returned logits that are not finite; the artifact is broken")
        yield done, logits
        done += len(logits)
    if done > len(ids):
        raise UserError(
            f"the engine returned logits of {done} positions for {len(ids)} tokens: it adds a token of its own "
            "(a beginning of sequence?)"
        )
    if done < len(ids):
        raise UserError(f"the engine returned logits of {done} positions for {len(ids)} tokens: it drops some")


def rows(engine: Engine, ids: list[int]) -> np.ndarray:
    """Log-probabilities [len(ids), vocab]. Raises as `chunks` does."""
    return perplexity.log_softmax(np.concatenate([logits.copy() for _, logits in chunks(engine, ids)]))


def pieces(ids: list[int]) -> list[list[int]]:
    """Take `PIECES` pieces of a text, `LENGTH` tokens each, without the text's first token, which may be special."""
    return [ids[start : start + LENGTH] for start in np.linspace(1, len(ids) - LENGTH, PIECES).astype(int)]


def probes(engine: Engine, ids: list[int], added: int) -> dict[str, Any]:
    """Return the reference's predictions after every token of the pieces, and the same with the token `added` first."""
    texts = pieces(ids)
    plain = [rows(engine, piece) for piece in texts]
    more = [rows(engine, [added, *piece]) for piece in texts]
    return {
        "vocab": plain[0].shape[1],
        "plain": [_top(each) for each in plain],
        "added": [_top(each) for each in more],
        "targets": {
            "plain": [_targets(each, piece) for each, piece in zip(plain, texts, strict=True)],
            "added": [_targets(each[1:], piece) for each, piece in zip(more, texts, strict=True)],
        },
    }


def check_logits(engine: Engine, ids: list[int], reference: Mapping[str, Any] | None) -> None:
    """Compare an engine's predictions with the reference's `probes` of the same text.

    Raises `UserError` if they are clearly those of another place, or of a text with an added token.
    """
    if reference is None:
        raise UserError("the reference's file has no probes: an older version made it; delete expected.json")
    found = [rows(engine, piece) for piece in pieces(ids)]
    if found[0].shape[1] < reference["vocab"]:
        raise UserError(f"the engine's vocabulary is {found[0].shape[1]}, the reference's {reference['vocab']}")
    found = [perplexity.log_softmax(each[:, : reference["vocab"]]) for each in found]
    _refuse_rival({fault: _distance(found, reference[kind], shift) for fault, (kind, shift) in EXPLANATIONS.items()})


def check_targets(engine: Engine, ids: list[int], reference: Mapping[str, Any] | None) -> None:
    """Do the same for an engine that returns only the targets' log-probabilities. Raises as `check_logits` does."""
    if reference is None or "targets" not in reference:
        raise UserError("the reference's file has no targets: an older version made it; delete expected.json")
    found = np.array([engine.target_logprobs(piece).logprobs for piece in pieces(ids)])
    plain, added = (np.array(reference["targets"][name]) for name in ("plain", "added"))
    if found.shape != plain.shape:
        raise UserError(f"the engine returned {found.shape[1]} log-probabilities for {plain.shape[1]} targets")
    rivals = {
        "": found - plain,
        "its log-probabilities are shifted by one, towards the token before": found[:, 1:] - plain[:, :-1],
        "its log-probabilities are shifted by one, towards the token after": found[:, :-1] - plain[:, 1:],
        ADDED: found - added,
    }
    _refuse_rival({fault: float(np.abs(difference).mean()) for fault, difference in rivals.items()})


def _refuse_rival(distances: Mapping[str, float]) -> None:
    """Raise `UserError` if an explanation other than the unnamed one is clearly nearer to the reference."""
    fault = min(distances, key=lambda name: distances[name])
    if distances[fault] < CLEARLY * distances[""]:
        raise UserError(
            f"the engine's predictions do not match its input tokens: {fault} (divergence from the reference "
            f"{distances['']:.3g} nats as given, {distances[fault]:.3g} with that explanation)"
        )


def check_chosen(engine: Engine, texts: Sequence[list[int]], added: int) -> str | None:
    """Compare the tokens that an engine decodes with its predictions. Return why that is impossible, or None.

    Raises `UserError` if they do not fit (`check_decoding`).
    """
    if "logits" in engine.capabilities:
        check_decoding(engine, texts, added)
        return None
    reason = "its engine returns neither logits nor its likeliest tokens"
    if "target_logprobs" not in engine.capabilities:
        return reason
    gaps: list[float] = []
    for start in _starts(texts):
        chosen = [token for _, token, _ in engine.decode([[start]], DECODED)]
        behind = gaps_of_targets(engine, [start], chosen)
        if behind is None:
            return reason
        gaps.append(float(behind.mean()))
    if median(gaps) > GAP:
        raise UserError(
            "the tokens that the engine decodes are not the likeliest of those that it predicts: one of them is "
            f"{median(gaps):.2g} nats ahead"
        )
    return None


def gaps_of_targets(engine: Engine, ids: list[int], chosen: Sequence[int]) -> np.ndarray | None:
    """Distance in nats of each token decoded after `ids` from the likeliest one, by an engine without logits, given the
    same tokens before it. None if it returns only the targets' probabilities."""
    told = engine.target_logprobs([*ids, *chosen])
    if not told.top_ids.shape[1]:
        return None
    if len(told.logprobs) != len(ids) + len(chosen) - 1:
        raise UserError(
            f"the engine returned {len(told.logprobs)} log-probabilities for {len(ids) + len(chosen)} tokens"
        )
    own, top_ids, top = (each[len(ids) - 1 :] for each in told)
    open_ = ~np.isin(top_ids, engine.stop_ids)  # as in decoding
    return np.maximum(np.where(open_, top, -np.inf).max(axis=1) - own, 0.0)


def _starts(texts: Sequence[list[int]]) -> list[int]:
    """Take single tokens of the texts, evenly spread."""
    known = list(dict.fromkeys(token for text in texts for token in (text[1:] or text)))
    places = np.linspace(0, len(known) - 1, STARTS).astype(int)
    return list(dict.fromkeys(known[place] for place in places))


def check_decoding(engine: Engine, texts: Sequence[list[int]], added: int) -> None:
    """Compare the tokens that an engine decodes with its logits. Raises `UserError` if they do not fit.

    Decoding starts from single tokens of `texts`, where an added token shows best.
    """
    added_first = "it adds a token (a beginning of sequence?) before the prompt when it decodes"
    gaps: dict[str, list[float]] = {"": [], LATE: [], EARLY: [], added_first: []}
    for start in _starts(texts):
        chosen = [token for _, token, _ in engine.decode([[start]], DECODED)]
        own, shifted = rows(engine, [start, *chosen]), rows(engine, [added, start, *chosen])
        own[:, engine.stop_ids] = shifted[:, engine.stop_ids] = -np.inf  # as in decoding
        gaps[""].append(_gap(own[:DECODED], chosen))
        gaps[LATE].append(_gap(own[1:], chosen))
        gaps[EARLY].append(_gap(own[: DECODED - 1], chosen[1:]))
        gaps[added_first].append(_gap(shifted[1 : DECODED + 1], chosen))
    middle = {fault: median(values) for fault, values in gaps.items()}
    as_given = middle.pop("")
    if as_given <= GAP:
        return
    best = min(middle, key=lambda fault: middle[fault])
    fault = best if middle[best] < CLEARLY * as_given else "it decodes after something else"
    raise UserError(
        f"the tokens that the engine decodes are not those of its own logits: {fault} (the likeliest token is "
        f"{as_given:.2g} nats ahead of the chosen one)"
    )


def largest_gap(engine: Engine, ids: list[int], outputs: Iterable[list[int]]) -> float:
    """Largest distance in nats of a token decoded after `ids` from the likeliest one, by the engine's logits, given the
    same tokens before it. Up to `TIE` the two may count as equal.

    Logits are taken chunk by chunk: the prompt may be long, and its rows are not needed.
    """
    largest, first = 0.0, len(ids) - 1  # the row that chose the first token
    for chosen in {tuple(output): output for output in outputs}.values():
        for place, logits in chunks(engine, [*ids, *chosen]):
            low, high = max(place, first), min(place + len(logits), first + len(chosen))
            if low < high:
                own = logits[low - place : high - place].copy()
                own[:, engine.stop_ids] = -np.inf  # as in decoding
                largest = max(largest, float(_gaps(own, chosen[low - first : high - first]).max()))
    return largest


def _gap(log_probabilities: np.ndarray, chosen: Sequence[int]) -> float:
    """Mean distance in nats of the chosen tokens from the likeliest ones."""
    return float(_gaps(log_probabilities, chosen).mean())


def _gaps(logits: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
    """Distance of each token, by logits or log-probabilities [len(chosen), vocab]; a constant a row does not count."""
    return logits.max(axis=1) - logits[np.arange(len(chosen)), chosen]


def _top(log_probabilities: np.ndarray) -> Rows:
    """Return the `TOP` most likely tokens of each row and their log-probabilities."""
    ids = np.argsort(-log_probabilities, axis=1)[:, :TOP]
    kept = np.take_along_axis(log_probabilities, ids, axis=1)
    return {"ids": ids.tolist(), "log_p": kept.round(6).tolist()}


def _targets(log_probabilities: np.ndarray, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each id that follows, from the row before it."""
    return log_probabilities[np.arange(len(ids) - 1), ids[1:]].round(6).tolist()


def _distance(found: Sequence[np.ndarray], reference: Sequence[Rows], shift: int) -> float:
    """Mean KL divergence, in nats, of rows i of an engine from rows i + shift of the reference."""
    total = []
    for ours, theirs in zip(found, reference, strict=True):
        ids, log_p = np.array(theirs["ids"]), np.array(theirs["log_p"])
        places = np.array([i for i in range(len(ours)) if 0 <= i + shift < len(ids)])
        ids, log_p = ids[places + shift], log_p[places + shift]
        log_q = np.take_along_axis(ours[places], ids, axis=1)
        rest_p, rest_q = (np.maximum(1 - np.exp(each).sum(axis=1), 1e-9) for each in (log_p, log_q))
        divergence = (np.exp(log_p) * (log_p - log_q)).sum(axis=1) + rest_p * np.log(rest_p / rest_q)
        total.append(divergence.mean())
    return float(np.mean(total))
