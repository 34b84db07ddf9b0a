"""Whether the right model answered, and the same one for every request: tokens and log-probabilities of a server, held
against those of the engine offline. Ties are judged by likelihood, as everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from scoring.alignment import CLEARLY, TIE
from serving.checks import Finding
from serving.stream import Reply

FAST = 0.7  # of the first answer's time, in which no server answers again without a cache
TEMPERATURES = np.concatenate((np.linspace(0.2, 0.95, 16), np.linspace(1.05, 2.0, 20)))

Ids = Sequence[int]
Context = Literal["alone", "load", "speculation"]
WORDS = {
    "alone": ("other_model", "another model or quantization is served"),
    "load": ("batch_dependent", "the server's tokens depend on what else it answers at the time"),
    "speculation": ("lossy_speculation", "speculation changes the tokens"),
}


def check_tokens(
    replies: Sequence[Reply],
    prompts: Sequence[Ids],
    behind: Callable[[Ids, Ids], Sequence[float]],
    context: Context,
    rivals: Mapping[str, Callable[[Ids], Ids]] | None = None,
) -> list[Finding]:
    """Whether each token that came is the likeliest of the engine offline, after the ones before it.

    Args:
        behind: of a prompt and what followed it: how many nats each token is less likely than the likeliest, by the
            engine offline. Up to `TIE` the two may be taken for equal.
        context: what is new in this load: nothing (one request at a time), other requests, or speculation. Where
            requests alone did not agree either, only that is worth telling.
        rivals: other explanations: a name and what becomes of a prompt by it, such as a token before it.
    """
    good = [reply for reply in replies if reply.ok and reply.ids]
    if not good:
        message = "no answer holds the ids of its tokens: whether they are those of the engine offline is not known"
        return [Finding("tokens_not_compared", message, refuses=False)]
    gaps = [behind(prompts[reply.number], reply.ids) for reply in good]
    wrong = [(reply, max(each)) for reply, each in zip(good, gaps, strict=True) if max(each) > TIE]
    if not wrong:
        return []
    gap, mean = max(gap for _, gap in wrong), np.concatenate(gaps).mean()
    many = f"{len(wrong)} of {len(good)} answers hold tokens up to {gap:.2f} nats behind the likeliest offline"
    many += f" ({mean:.2g} in the mean)"
    for name, change in (rivals or {}).items():
        if all(max(behind(change(prompts[reply.number]), reply.ids)) <= TIE for reply, _ in wrong):
            return [Finding(name, f"{many}, and none if {name.replace('_', ' ')} is assumed")]
    fault, words = WORDS[context]
    return [Finding(fault, f"{words}: {many}")]


def tokens_equal(replies: Sequence[Reply], offline: Sequence[Ids]) -> float | None:
    """The share of answers whose ids are exactly the offline engine's; None where no ids came."""
    good = [reply for reply in replies if reply.ok and reply.ids]
    return sum(tuple(offline[reply.number]) == reply.ids for reply in good) / len(good) if good else None


def check_repeats(first: Sequence[Reply], again: Sequence[Reply], longer: Sequence[Reply]) -> list[Finding]:
    """Whether a server samples, or keeps prompts or answers that it was told not to keep.

    Each one request at a time, with prompts of which reading takes far longer than the way there and back.

    Args:
        first: answers to prompts that the server had not seen.
        again: answers to the same prompts.
        longer: answers to the same prompts with another last token.
    """
    pairs = [(old, new) for old, new in zip(first, again, strict=True) if old.ok and new.ok]
    if not pairs:
        reason = next((reply.error or reply.failure for reply in (*first, *again) if not reply.ok), "nothing was sent")
        return [Finding("not_repeated", f"no prompt was answered twice ({reason}): what the server keeps is not known")]
    found = []
    different = [old for old, new in pairs if old.ids != new.ids or old.text != new.text]
    if 2 * len(different) > len(pairs):  # fewer may be ties, which `check_tokens` judges
        message = f"{len(different)} of {len(pairs)} prompts were answered otherwise when they were sent again"
        found.append(Finding("sampling", f"the server samples: {message}"))
    if max(_ratio(first, again, _decode_seconds), _ratio(longer, again, _decode_seconds)) < FAST:
        message = "the server keeps answers: a prompt that it has seen is answered at once"
        found.append(Finding("answers_cached", message))
    elif (share := max(_ratio(first, again, _prompt_seconds), _ratio(first, longer, _prompt_seconds))) < FAST:
        message = f"one whose beginning it has seen takes {share:.0%} of the time of a new one"
        found.append(Finding("prefix_cached", f"the server keeps prompts: {message}"))
    return found


def _prompt_seconds(reply: Reply) -> float:
    return reply.events[0].time - reply.intended


def _decode_seconds(reply: Reply) -> float:
    return reply.events[-1].time - reply.events[0].time


def _ratio(old: Sequence[Reply], new: Sequence[Reply], seconds: Callable[[Reply], float]) -> float:
    """How much time the newer answers took of the older ones': medians; 1 where nothing can be told."""
    times = [[seconds(reply) for reply in replies if reply.ok and len(reply.events) > 1] for replies in (old, new)]
    if not times[0] or np.median(times[0]) <= 0:
        return 1.0
    return float(np.median(times[1]) / np.median(times[0])) if times[1] else 0.0


def check_logprobs(
    told: Sequence[Sequence[float | None]], ids: Sequence[Ids], rows: Callable[[Ids], np.ndarray]
) -> list[Finding]:
    """Whether the log-probabilities that a server tells of prompts' tokens are the engine's own.

    Args:
        told: for each text the value of each of its tokens, that of the first (which nothing precedes) aside.
        ids: the texts' ids; each one is a token longer than its values.
        rows: the log-probabilities [len(ids) - 1, vocab] of the engine offline after each id but the last.
    """
    missing = sum(value is None for values in told for value in values)
    if missing:
        total = sum(map(len, told))
        return [Finding("logprobs_missing", f"{missing} of {total} log-probabilities of prompts are missing")]
    tables = [np.asarray(rows(text)) for text in ids]
    own = [table[np.arange(len(text) - 1), list(text[1:])] for table, text in zip(tables, ids, strict=True)]
    given = [np.array(values, dtype=np.float64) for values in told]
    distance = _distance(given, own)
    if distance <= TIE:
        return []
    cooled = [
        (_distance(given, [_at(table, text, t) for table, text in zip(tables, ids, strict=True)]), float(t))
        for t in TEMPERATURES
    ]
    warmth, temperature = min(cooled)
    rivals = {
        "logprobs_shifted": (
            min(_shift_distance(given, own), _shift_distance(own, given)),
            "those of the place beside",
        ),
        "logprobs_stale": (_distance(given[1:], own[:-1]), "those of the text before"),
        "logprobs_temperature": (warmth, f"those of temperature {temperature:.2f}"),
    }
    fault, (nearest, words) = min(rivals.items(), key=lambda item: item[1][0])
    if nearest < CLEARLY * distance:
        message = f"{nearest:.3f} nats away, {distance:.3f} as they stand"
        return [Finding(fault, f"the log-probabilities are {words}: {message}")]
    words = f"the log-probabilities are {distance:.3f} nats from the engine's own"
    return [Finding("other_model", f"{words}: another model or quantization is served")]


def _at(table: np.ndarray, text: Ids, temperature: float) -> np.ndarray:
    scaled = table / temperature
    scaled = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return scaled[np.arange(len(text) - 1), list(text[1:])]


def _shift_distance(early: Sequence[np.ndarray], late: Sequence[np.ndarray]) -> float:
    """The distance where the early ones stand a place too early."""
    return _distance([values[:-1] for values in early], [values[1:] for values in late])


def _distance(given: Sequence[np.ndarray], own: Sequence[np.ndarray]) -> float:
    """Median distance of values, in nats; infinite where there are none beside one another."""
    pairs = [(a, b) for a, b in zip(given, own, strict=True)]
    distances = [np.abs(a[: len(b)] - b[: len(a)]) for a, b in pairs]
    flat = np.concatenate(distances) if distances else np.array([])
    return float(np.median(flat)) if len(flat) else float("inf")
