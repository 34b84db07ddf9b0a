"""The only entry for what a server says: read within bounds, without secrets, and refused where it cannot be true."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quantmill.common import bounded_json
from quantmill.common.redaction import Secrets
from quantmill.metrics.targets import Targets

MAX_IDS = 2**31  # of an unknown vocabulary
MAX_WORD = 200  # characters of a name or a reason
MAX_COUNT = 2**40  # tokens
ABOVE = 1e-3  # nats by which rounding may put a log-probability above 0, or above a likelier one
LOWEST = -1e5  # nats: what servers write for impossible tokens is above that
WHOLE = 1.02  # largest sum of probabilities of one place: bfloat16's are off by a percent
FEW = 2  # targets that may all be certain


class Untrue(ValueError):
    """A server's answer cannot be true: the field, and its value."""


class Usage(NamedTuple):
    """A server's own counts; None where it does not report them."""

    prompt_tokens: int | None = None
    new_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE = Usage()


class Piece(NamedTuple):
    """The content of one event of a stream, or of one whole answer.

    `tokens_so_far` includes this event's, where a server reports it; `finish` is `length`, `stop` or the server's own
    word; after `last` nothing comes, not even [DONE].
    """

    ids: list[int] | None = None
    text: str = ""
    tokens_so_far: int | None = None
    finish: str | None = None
    usage: Usage | None = None
    model: str | None = None
    prompt_ids: list[int] | None = None
    last: bool = False


@dataclass(frozen=True)
class Expected:
    """Facts that a server's answers are checked against.

    Attributes:
        vocabulary: the artifact's number of tokens; None where it is unknown.
        model: the name that was asked for; None where a server may answer with another.
    """

    vocabulary: int | None = None
    model: str | None = None


ANYTHING = Expected()


class Told(NamedTuple):
    """A server's log-probabilities of a text, as in its answer.

    field: its name there. logprobs: of each id except the first. top: of each of these places the likeliest tokens,
    each with id and log-probability.
    """

    field: str
    logprobs: list[Any]
    top: list[list[tuple[Any, Any]]]


def parse(
    content: bytes, secrets: Secrets, limit: int = bounded_json.MAX_BYTES, values: int = bounded_json.MAX_VALUES
) -> Any:
    """Parse JSON, without secrets and halves of characters. Raises ValueError where it is not JSON, too large, or holds
    NaN or infinity."""
    found = bounded_json.loads(content, limit, values, parse_constant=_no_number)
    if secrets.may_be_in(content):
        found = secrets.value(_whole(found) if b"\\u" in content else found)
    return found


def check(piece: Piece, expected: Expected) -> Piece:
    """Return the piece. Raises TypeError where a value has a wrong type, `Untrue` where one cannot be true."""
    if not isinstance(piece.text, str) or not all(isinstance(each, str | None) for each in (piece.finish, piece.model)):
        raise TypeError("no text")
    check_ids("token", piece.ids or [], expected.vocabulary)
    check_ids("prompt token", piece.prompt_ids or [], expected.vocabulary)
    for name, count in (*(piece.usage or NO_USAGE)._asdict().items(), ("tokens_so_far", piece.tokens_so_far)):
        if type(count) not in (int, type(None)):
            raise TypeError(f"{name} is not a whole number")
        if count is not None and not 0 <= count <= MAX_COUNT:
            raise Untrue(f"it counts {_short(count)} {name}")
    for name, word in (("finish reason", piece.finish), ("model's name", piece.model)):
        if word and len(word) > MAX_WORD:
            raise Untrue(f"its {name} has {len(word):,} characters")
    if piece.model and expected.model and not is_called(piece.model, expected.model):
        raise Untrue(f"another model is served: it answers as {piece.model!r}, and was asked for {expected.model!r}")
    return piece


def check_ids(name: str, ids: Sequence[Any], vocabulary: int | None) -> None:
    """Raise TypeError where one is not a whole number, `Untrue` where it is outside the vocabulary."""
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise TypeError(f"a {name} is not a whole number")
    if ids and min(ids) < 0:
        raise Untrue(f"another model is served: it returns {name} {_short(min(ids))}, and ids begin at 0")
    if ids and max(ids) >= (MAX_IDS if vocabulary is None else vocabulary):
        verb = "writes" if name == "token" else "returns"
        has = MAX_IDS if vocabulary is None else vocabulary
        raise Untrue(
            f"another model is served: it {verb} {name} {_short(max(ids))}, and the artifact's vocabulary has {has}"
        )


def is_called(said: str, asked: str) -> bool:
    """Return whether a server's name is the one that was asked for; transformers serve appends a revision."""
    return asked in (said, said.partition("@")[0])


def targets(told: Told, ids: Sequence[int], vocabulary: int | None, top: int) -> Targets:
    """Return a server's log-probabilities of a text's ids. Raises `Untrue` where they cannot be that.

    Args:
        top: the number of likeliest tokens that was asked for; a server may return fewer.
    """
    field, places, most = told.field, len(ids) - 1, min(top, vocabulary or top)
    for name, count in (("log-probabilities", len(told.logprobs)), ("likeliest tokens", len(told.top))):
        if count != places:
            raise Untrue(f"{field} holds {name} of {count} places, and {places} follow the first of {len(ids)}")
    count = len(told.top[0]) if told.top else 0  # some servers return fewer than were asked for
    for place, likeliest in enumerate(told.top, 1):
        if len(likeliest) != count or not 0 < count <= most:
            raise Untrue(f"{field} holds {len(likeliest)} likeliest tokens of place {place}, of {most} asked for")
        try:
            check_ids("token", [token for token, _ in likeliest], vocabulary)
        except (TypeError, Untrue) as error:
            raise Untrue(f"{field}, place {place}: {error}") from None
        if len({token for token, _ in likeliest}) != count:
            raise Untrue(f"{field} holds one token twice at place {place}")
    logprobs = _numbers(field, told.logprobs)
    values = np.array([_numbers(field, [value for _, value in each]) for each in told.top]).reshape(places, count)
    tokens = np.array([[token for token, _ in each] for each in told.top], np.int64).reshape(places, count)
    if places > FEW and not logprobs.any():
        raise Untrue(f"{field} holds {places} log-probabilities that are all 0, as if every token were certain")
    sums = np.exp(values).sum(axis=1)
    if places and sums.max() > WHOLE:
        raise Untrue(f"{field}: the likeliest tokens of place {sums.argmax() + 1} have probability {sums.max():.3g}")
    if count and places:
        _check_order(field, ids, logprobs, tokens, values)
    return Targets(logprobs, tokens, values)


def _check_order(field: str, ids: Sequence[int], logprobs: np.ndarray, tokens: np.ndarray, values: np.ndarray) -> None:
    """Raise `Untrue` where the likeliest tokens are not the likeliest, or a token has two log-probabilities."""
    if (np.diff(values, axis=1) > ABOVE).any():
        place = int((np.diff(values, axis=1) > ABOVE).any(axis=1).argmax()) + 1
        raise Untrue(f"{field}: the likeliest tokens of place {place} are not in order")
    among = tokens == np.array(ids[1:])[:, None]
    twice = np.where(among, np.abs(values - logprobs[:, None]), 0.0).max(axis=1)
    ahead = np.where(among.any(axis=1), 0.0, logprobs - values[:, -1])
    for off, words in ((twice, "has two log-probabilities"), (ahead, "is likelier than one of the likeliest")):
        if off.max() > ABOVE:
            place = int(off.argmax()) + 1
            raise Untrue(f"{field}: token {ids[place]} of place {place} {words}, {off.max():.3g} nats apart")


def _numbers(field: str, values: Sequence[Any]) -> np.ndarray:
    """Return log-probabilities as an array. Raises `Untrue` where one cannot be that."""
    for value in values:
        if type(value) not in (int, float) or not LOWEST <= value < np.inf:
            raise Untrue(f"{field} holds {_short(value)}, which is not a log-probability")
        if value > ABOVE:
            raise Untrue(f"{field} holds a log-probability of {_short(value)}, and none is above 0")
    return np.minimum(np.array(values, np.float64), 0.0)


def _whole(value: Any) -> Any:
    """Return the value with a mark for each escaped half of a character, which no file could hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole(key): _whole(each) for key, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, list) else value


def _no_number(word: str) -> Any:
    raise Untrue(f"it says {word}, which is not a number")


def _short(value: Any) -> str:
    return f"{value!r:.40}"
