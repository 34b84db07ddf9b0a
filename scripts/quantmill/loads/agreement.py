"""Compare a server's answers under load with those of one request at a time, and with its own predictions.

Ties are judged by likelihood, as everywhere. The row's own score shows which model the server has.
"""

from collections.abc import Callable, Sequence

import numpy as np

from quantmill.client.checks import Finding
from quantmill.client.stream import Reply
from quantmill.quality.alignment import GAP, TIE

FAST = 0.7  # of the first answer's time; only a server with a cache answers again in less

Ids = Sequence[int]


def check_tokens(
    replies: Sequence[Reply],
    alone: Sequence[Reply],
    prompts: Sequence[Ids],
    behind: Callable[[Ids, Ids], Sequence[float]],
    rounds: bool = False,
) -> list[Finding]:
    """Check that each token of a load is the likeliest after the tokens before it.

    Args:
        replies: some of the load's answers.
        alone: answers to the same prompts, one at a time. If their tokens are not the likeliest either, the load is
            not the cause.
        behind: returns for a prompt and its answer how many nats each token is behind the likeliest, as the server
            predicts one text at a time. Up to `TIE` the two count as equal.
        rounds: whether the format rounds activations. The smallest difference in a sum then moves all predictions
            (benchmarks/rounding_noise.py), and a server adds in another order when it decodes than when it prefills. So
            the mean of all tokens is judged, as a decoder's is: up to `GAP` is only a note.
    """
    good = [reply for reply in replies if reply.ok and reply.ids]
    if not good:
        message = "no answer has token ids: whether its tokens are the likeliest is unknown"
        return [Finding("tokens_not_compared", message, refuses=False)]
    gaps, own = _gaps(good, prompts, behind), _gaps(alone, prompts, behind)
    wrong = [max(each) for each in gaps if max(each) > TIE]
    if not wrong:
        return []
    mean = float(np.concatenate(gaps).mean())
    many = f"{len(wrong)} of {len(good)} answers hold tokens up to {max(wrong):.2f} nats behind the likeliest that it "
    many += f"predicts itself ({mean:.2g} in the mean)"
    if rounds and mean <= GAP:
        message = f"{many}: the format rounds activations, which explains a mean of up to {GAP}"
        return [Finding("tokens_moved", message, refuses=False)]
    if own and (np.concatenate(own).mean() > GAP if rounds else max(map(max, own)) > TIE):
        words = "the server's tokens are not those that it predicts, even for one request at a time"
        return [Finding("unlike_predictions", f"{words}: {many}")]
    words = "the server's tokens depend on its other requests"
    return [Finding("batch_dependent", f"{words}: {many}")]


def _gaps(
    replies: Sequence[Reply], prompts: Sequence[Ids], behind: Callable[[Ids, Ids], Sequence[float]]
) -> list[Sequence[float]]:
    """Return the distances of each answer that has ids."""
    return [behind(prompts[reply.number], reply.ids) for reply in replies if reply.ok and reply.ids]


def check_repeats(first: Sequence[Reply], again: Sequence[Reply], longer: Sequence[Reply]) -> list[Finding]:
    """Check that a server does not sample, and caches neither prompts nor answers.

    All answers are to one request at a time. Prefill of the prompts takes far longer than the round trip.

    Args:
        first: answers to new prompts.
        again: answers to the same prompts.
        longer: answers to the same prompts with another last token.
    """
    pairs = [(old, new) for old, new in zip(first, again, strict=True) if old.ok and new.ok]
    if not pairs:
        reason = next((reply.error or reply.failure for reply in (*first, *again) if not reply.ok), "nothing was sent")
        return [Finding("not_repeated", f"no prompt was answered twice ({reason}): what the server caches is unknown")]
    found = []
    different = [old for old, new in pairs if old.ids != new.ids or old.text != new.text]
    if 2 * len(different) > len(pairs):  # fewer may be ties, which `check_tokens` judges
        message = f"{len(different)} of {len(pairs)} prompts got another answer when they were sent again"
        found.append(Finding("sampling", f"the server samples: {message}"))
    if max(_ratio(first, again, _decode_seconds), _ratio(longer, again, _decode_seconds)) < FAST:
        message = "the server caches answers: it answers a prompt that it has seen at once"
        found.append(Finding("answers_cached", message))
    elif (share := max(_ratio(first, again, _prompt_seconds), _ratio(first, longer, _prompt_seconds))) < FAST:
        message = f"a prompt whose beginning it has seen takes {share:.0%} of the time of a new one"
        found.append(Finding("prefix_cached", f"the server caches prompts: {message}"))
    return found


def _prompt_seconds(reply: Reply) -> float:
    return reply.events[0].time - reply.intended


def _decode_seconds(reply: Reply) -> float:
    return reply.events[-1].time - reply.events[0].time


def _ratio(old: Sequence[Reply], new: Sequence[Reply], seconds: Callable[[Reply], float]) -> float:
    """Return the median time of the new answers over that of the old; 1 if there is none."""
    times = [[seconds(reply) for reply in replies if reply.ok and len(reply.events) > 1] for replies in (old, new)]
    if not times[0] or np.median(times[0]) <= 0:
        return 1.0
    return float(np.median(times[1]) / np.median(times[0])) if times[1] else 0.0
