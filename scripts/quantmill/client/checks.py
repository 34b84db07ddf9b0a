"""Checks of a load's answers before its figures are shown. Each finding is one line.

A finding that `refuses` removes the figures; the others are notes on them. loads.load_checks checks that server and
client worked evenly, loads.agreement that the server answers as it predicts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantmill.client.connection import NO_FILES
from quantmill.client.stream import REJECTED, Reply

MAX_WHOLE = 0.01  # share of answers that may come in one event: what p99 leaves out
ACCEPTANCE = 0.02  # relative difference between the server's count of accepted tokens and the streams'


class Finding(NamedTuple):
    """A fault: a short name, one line, and whether the figures are refused for it."""

    fault: str
    message: str
    refuses: bool = True


class LoadRequest(NamedTuple):
    """One request: a prompt's token ids, and how many tokens were to follow."""

    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Counters:
    """A server's own counters; None where it does not report them."""

    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    cached_tokens: float | None = None
    preemptions: float | None = None
    drafted: float | None = None
    accepted: float | None = None

    def since(self, before: "Counters") -> "Counters":
        """Return what was counted since `before`."""
        mine, theirs = vars(self), vars(before)
        return Counters(
            **{name: None if None in (mine[name], theirs[name]) else mine[name] - theirs[name] for name in mine}
        )


def check_replies(replies: Sequence[Reply], asked: Sequence[LoadRequest]) -> list[Finding]:
    """Check that every request has a whole answer of the requested length."""
    found = [*_check_failures(replies)]
    good = [reply for reply in replies if reply.ok]
    stopped = [reply for reply in good if reply.finish != "length"]
    if stopped:
        word = Counter(reply.finish for reply in stopped).most_common(1)[0][0]
        message = f"{_of(stopped, good)} ended with {word!r} instead of 'length'"
        found.append(Finding("ended_early", f"{message}: the server does not ignore the end of sequence"))
    pairs = [(asked[reply.number].new_tokens, _tokens(reply, asked)) for reply in good if reply.finish == "length"]
    rest = [(wanted, tokens) for wanted, tokens in pairs if tokens is not None]
    for fault, word, wrong in (
        ("short", "fewer", [each for each in rest if each[1] < each[0]]),
        ("long", "more", [each for each in rest if each[1] > each[0]]),
    ):
        if wrong:
            wanted, tokens = wrong[0]
            message = f"{_of(wrong, good)} have {word} tokens than were asked for: {tokens} of {wanted} in one of them"
            found.append(Finding(fault, message))
    if any(reply.tokens is None for reply in good):
        message = "the server returns no ids: tokens are counted from the text, or taken from its usage"
        found.append(Finding("no_ids", message, refuses=False))
    return found + _check_events(good, asked) + _check_usage(good, asked)


def _tokens(reply: Reply, asked: Sequence[LoadRequest]) -> int | None:
    """Return the number of new tokens. Of a reply without ids it is the server's count, or the requested number if that
    is close: some servers count the tokens of their text again."""
    told = reply.usage.new_tokens
    if reply.tokens is not None or told is None:
        return reply.tokens
    wanted = asked[reply.number].new_tokens
    return wanted if abs(told - wanted) <= max(2, wanted // 10) else told


def _check_failures(replies: Sequence[Reply]) -> list[Finding]:
    found = []
    rejected = [reply for reply in replies if reply.status in REJECTED]
    unsent = [reply for reply in replies if reply.failure == NO_FILES]
    rest = [reply for reply in replies if not reply.ok and reply.status not in REJECTED and reply.failure != NO_FILES]
    if rejected:
        statuses = " and ".join(sorted({str(reply.status) for reply in rejected}))
        found.append(Finding("rejected", f"{_of(rejected, replies)} were rejected with status {statuses}"))
    if unsent:
        message = f"{NO_FILES} for {len(unsent)} of {len(replies)} requests; raise its limit (ulimit -Hn)"
        found.append(Finding("open_files", message))
    cut = [reply for reply in rest if reply.status == 200 and not reply.error]
    untrue = [reply for reply in rest if reply.untrue]
    inside = [reply for reply in rest if reply.status == 200 and reply.error and not reply.untrue]
    for fault, wrong, words in (
        ("untrue", untrue, "say what cannot be true"),
        ("cut", cut, "have a stream that was cut before its end"),
        ("error_inside", inside, "have status 200 and an error inside"),
        ("failed", [reply for reply in rest if reply.status != 200], "failed"),
    ):
        if wrong:
            reasons = Counter(reply.error or reply.failure or "no end of the stream" for reply in wrong)
            found.append(Finding(fault, f"{_of(wrong, replies)} {words}: {reasons.most_common(1)[0][0]}"))
    return found


def _check_events(good: Sequence[Reply], asked: Sequence[LoadRequest]) -> list[Finding]:
    found = []
    whole = [reply for reply in good if asked[reply.number].new_tokens > 1 and len(reply.events) == 1]
    streamed = [reply for reply in good if len(reply.events) > 1]
    many = [reply for reply in streamed if any((event.tokens or 0) > 1 for event in reply.events)]
    if whole:
        few = len(whole) <= MAX_WHOLE * len(good)
        why = "does not keep up, and these have no TPOT" if few else "does not stream, and has no TTFT and no TPOT"
        found.append(Finding("one_event", f"{_of(whole, good)} came in one event: the server {why}", refuses=not few))
    if many:
        mean = sum(reply.tokens or 0 for reply in many) / sum(len(reply.events) for reply in many)
        message = f"{_of(many, good)} have events of several tokens, {mean:.1f} in the mean: gaps are those of events"
        found.append(Finding("many_tokens_an_event", message, refuses=False))
    for oddity, message in (
        ("split", "events came in several packets; their time is that of the last packet"),
        ("split_utf8", "packets ended inside a character"),
        ("pings", "comments were in the streams; they are not tokens"),
        ("empty", "events without text came before the first token; TTFT waits for the token"),
        ("cumulative", "events repeat the earlier text; only new text counts"),
        ("withheld", "tokens came without ids; their number is the server's"),
    ):
        number = sum(reply.oddities[oddity] for reply in good)
        if number:
            found.append(Finding(oddity, f"{number} {message}", refuses=False))
    return found


def _check_usage(good: Sequence[Reply], asked: Sequence[LoadRequest]) -> list[Finding]:
    found = []
    silent = [reply for reply in good if reply.usage.new_tokens is None]
    if silent:
        message = f"{_of(silent, good)} report no usage: the server's count cannot be compared with the client's"
        found.append(Finding("no_usage", message, refuses=False))
    told = [reply for reply in good if reply not in silent]
    lies = [reply for reply in told if reply.tokens is not None and reply.tokens != reply.usage.new_tokens]
    if lies:
        message = f"{lies[0].usage.new_tokens} tokens where {lies[0].tokens} came"
        found.append(Finding("usage_differs", f"{_of(lies, good)} have a wrong usage: {message}"))
    cached = sum(reply.usage.cached_tokens or 0 for reply in told)
    if cached:
        found.append(Finding("cached", f"{cached} tokens of prompts came out of the server's cache"))
    return found + _check_prompts(good, asked)


def _check_prompts(good: Sequence[Reply], asked: Sequence[LoadRequest]) -> list[Finding]:
    """Check that the server read the ids that it was sent."""
    kinds: dict[str, list[str]] = {}
    for reply in good:
        prompt = asked[reply.number].prompt
        if isinstance(prompt, str):
            continue
        read = reply.prompt_ids
        number = len(read) if read is not None else reply.usage.prompt_tokens
        if number is None or (number == len(prompt) and read in (None, tuple(prompt))):
            continue
        if number > len(prompt) and (read is None or list(read[-len(prompt) :]) == prompt):
            kind = "token_added"
        elif number < len(prompt) and (read is None or list(read) == prompt[-number:]):
            kind = "prompt_cut"
        else:
            kind = "other_prompt"
        kinds.setdefault(kind, []).append(f"{number} tokens for {len(prompt)}")
    words = {
        "token_added": "the server adds tokens of its own before the prompt (a beginning of sequence?)",
        "prompt_cut": "the server cuts prompts on the left",
        "other_prompt": "the server reads other ids than it is sent",
    }
    return [Finding(kind, f"{words[kind]}: it read {example[0]}") for kind, example in kinds.items()]


def check_counters(counted: Counters, replies: Sequence[Reply], cache_off: bool) -> list[Finding]:
    """Compare the server's counters over the load with what came, where all requests were this load's.

    Args:
        counted: the counters' increase.
        cache_off: whether the server's prefix cache was switched off.
    """
    found = []
    came = sum(reply.tokens or 0 for reply in replies)
    # the server has counted tokens of abandoned answers that never came
    comparable = not any(reply.failure or reply.tokens is None for reply in replies)
    if counted.generated_tokens is not None and comparable and counted.generated_tokens != came:
        message = f"the server counts {counted.generated_tokens:.0f} new tokens where {came} came"
        found.append(Finding("counter_differs", message))
    if counted.cached_tokens and cache_off:
        message = f"{counted.cached_tokens:.0f} tokens of prompts came out of the cache, which was to be off"
        found.append(Finding("cached", message))
    if counted.accepted is not None and counted.drafted and comparable:
        seen = came - sum(len(reply.events) for reply in replies)
        # vLLM counts a whole draft, also what is right beyond the last requested token
        unseen = sum(max((event.tokens or 1 for event in reply.events), default=1) - 1 for reply in replies)
        margin = ACCEPTANCE * max(seen, 1)
        if counted.accepted > counted.drafted or not -margin <= counted.accepted - seen <= unseen + margin:
            message = f"{counted.accepted:.0f} of {counted.drafted:.0f}, where the streams hold {seen}"
            found.append(Finding("acceptance", f"the server's count of accepted tokens is wrong: {message}"))
    return found


def _of(some: Sequence[object], all_of_them: Sequence[object]) -> str:
    return f"{len(some)} of {len(all_of_them)} answers"
