"""Read stored responses: bytes and the times of their arrival become events with tokens and times.

An event's time is that of the arrival that completed it, however its bytes were cut into chunks and packets. No answer
of a server raises: what cannot be read is the reply's `error`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from quantmill.client import words
from quantmill.client.body import Body, read_body
from quantmill.client.connection import TIMED_OUT, Exchange
from quantmill.client.dialects import Dialect
from quantmill.client.http1 import read_head
from quantmill.client.sse import read_events, read_lines
from quantmill.client.words import ANYTHING, NO_USAGE, Expected, Piece, Untrue, Usage
from quantmill.common import redaction
from quantmill.common.redaction import Secrets
from quantmill.metrics.serving import Outcome, Timeline

REJECTED = (429, 503)
MAX_EVENT = 2**22  # bytes of one event's JSON
MAX_ERROR = 300  # characters of what a server says
MAX_SHOWN = 2**16  # bytes of it that are searched for secrets
CUMULATIVE = 3  # events that each begin with the whole one before
JSON_ERRORS = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)


class Event(NamedTuple):
    """Tokens that came together, and their time. `tokens` and `ids` are None where the server does not report them."""

    time: float
    tokens: int | None
    ids: tuple[int, ...] | None
    text: str


@dataclass
class Reply:
    """The answer to one request; times as in its `Exchange`.

    Attributes:
        events: those that brought tokens or text.
        finish: the reason that the server gave: `length`, `stop`, or another word.
        error: the server's message instead of an answer, or what in its answer could not be read.
        failure: why no complete response came.
        untrue: whether the error is an answer that cannot be true.
        ended: whether the stream marked its end.
        oddities: counts of what a client must tolerate: `pings` (comments), `empty` (events without text or tokens
            before the first token), `split` (events over several packets), `split_utf8` (packets that end inside a
            character), `cumulative` (events that repeat what came before), `withheld` (tokens without an id).
    """

    number: int
    intended: float
    sent: float | None
    finished: float | None
    failure: str | None
    status: int | None = None
    events: list[Event] = field(default_factory=list)
    finish: str | None = None
    usage: Usage = NO_USAGE
    model: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    error: str | None = None
    untrue: bool = False
    ended: bool = False
    oddities: Counter[str] = field(default_factory=Counter)

    @property
    def ids(self) -> tuple[int, ...] | None:
        """Return all new tokens; None where the server does not report all of them."""
        if not self.events or self.oddities["withheld"] or any(event.ids is None for event in self.events):
            return None
        return tuple(token for event in self.events for token in event.ids or ())

    @property
    def text(self) -> str:
        """Return all new text."""
        return "".join(event.text for event in self.events)

    @property
    def tokens(self) -> int | None:
        """Return the number of new tokens; None where only the text is known."""
        known = [event.tokens for event in self.events if event.tokens is not None]
        return sum(known) if len(known) == len(self.events) else None

    @property
    def ok(self) -> bool:
        """Return whether there is a whole answer without an error."""
        return self.status == 200 and self.ended and not self.failure and not self.error


def timeline(reply: Reply, count: Callable[[str], int] | None = None) -> Timeline:
    """Return the times and counts of a reply, from which figures are calculated.

    Where only text came, `count` counts its tokens, or else the server's usage does; they are spread evenly over the
    events.
    """
    counts: list[float] = [event.tokens or 0 for event in reply.events]
    if reply.tokens is None:
        total = count(reply.text) if count else reply.usage.new_tokens or 0
        counts = [total / len(counts)] * len(counts)
    outcome: Outcome = "ok" if reply.ok else "failed"
    if reply.status in REJECTED:
        outcome = "rejected"
    elif reply.failure and reply.failure.startswith(TIMED_OUT):
        outcome = "unfinished"
    times = tuple(event.time for event in reply.events)
    end = reply.finished if reply.finished is not None else reply.intended
    return Timeline(reply.number, reply.intended, reply.sent, end, times, tuple(counts), outcome)


def read(exchange: Exchange, dialect: Dialect, token: str | None = None, expected: Expected = ANYTHING) -> Reply:
    """Read a response.

    Args:
        token: the server's secret. The reply shows neither it nor other secrets that this process knows.
        expected: what the server's answer is checked against.
    """
    reply = Reply(exchange.number, exchange.intended, exchange.sent, exchange.finished, exchange.failure)
    secrets = redaction.of(token)
    try:
        head = read_head(exchange.data)
        if head is None:
            return reply
        reply.status = head.status
        body = read_body(exchange, head)
    except ValueError as error:
        reply.error = f"broken HTTP: {error}"
        return reply
    reading = _Reading(reply, body, dialect, secrets, expected, complete=exchange.failure is None)
    if head.status != 200:
        reply.error = _message(body.content, secrets) or f"status {head.status}"
    elif "event-stream" in head.content_type or body.content.lstrip()[:5] in (b"data:", b"event"):
        reading.stream(read_events)
    elif "ndjson" in head.content_type:
        reading.stream(read_lines)
    else:
        reading.whole()
    if reply.error:  # cut last: a part of a secret could not be found
        reply.error = secrets.text(reply.error)[:MAX_ERROR]
    return reply


@dataclass
class _Reading:
    """A body that is being read into a reply."""

    reply: Reply
    body: Body
    dialect: Dialect
    secrets: Secrets
    expected: Expected
    complete: bool

    def stream(self, events: Callable[..., Any]) -> None:
        """Read the events that `events` finds."""
        reply, body, pieces = self.reply, self.body, []
        for start, end, name, value in events(body.content, self.complete, reply.oddities):
            first, last = body.arrival(start), body.arrival(end - 1)
            _count_splits(reply.oddities, body, first, last)
            if value.strip() == b"[DONE]":
                reply.ended = True
            elif piece := self.piece(value, name, "an event"):
                reply.ended |= piece.last
                pieces.append((body.exchange.stamps[last], piece))
        self.take(pieces)

    def whole(self) -> None:
        """Read one JSON object for all tokens, which came when it was complete."""
        piece = self.piece(self.body.content, b"", "an answer")
        if piece:
            self.reply.ended = self.complete
            self.take([(self.body.exchange.stamps[-1], piece)])

    def piece(self, value: bytes, name: bytes, what: str) -> Piece | None:
        """Return the content of one JSON object; None where it cannot be read, which is then the reply's error."""
        try:
            content = words.parse(value, self.secrets, MAX_EVENT)
            if (error := message(content, name)) is None:
                return words.check(self.dialect.read(content), self.expected)
            untrue = False
        except Untrue as found:
            error, untrue = str(found), True
        except JSON_ERRORS:
            error, untrue = f"{what} that cannot be read: {_short(value)}", False
        if self.reply.error is None:
            self.reply.error, self.reply.untrue = error, untrue
        return None

    def take(self, pieces: list[tuple[float, Piece]]) -> None:
        """Fill the reply from its events."""
        reply = self.reply
        try:
            _take(reply, pieces)
        except Untrue as found:
            reply.error, reply.untrue = reply.error or str(found), True
        text = reply.text
        if (clean := self.secrets.text(text)) != text:  # a secret that came in parts
            places = [clean, *[""] * (len(reply.events) - 1)]
            reply.events = [each._replace(text=part) for each, part in zip(reply.events, places, strict=True)]


def _count_splits(oddities: Counter[str], body: Body, first: int, last: int) -> None:
    if first == last:
        return
    oddities["split"] += 1
    data, ends = body.exchange.data, body.exchange.ends
    if any(0x80 <= data[ends[number]] < 0xC0 for number in range(first, last)):
        oddities["split_utf8"] += 1


def _take(reply: Reply, pieces: list[tuple[float, Piece]]) -> None:
    """Fill the reply from its events. Raises `Untrue` where they count fewer tokens than they hold."""
    for _, piece in pieces:
        reply.finish = piece.finish or reply.finish
        reply.usage = piece.usage or reply.usage
        reply.model = piece.model or reply.model
        if piece.prompt_ids is not None and reply.prompt_ids is None:
            reply.prompt_ids = tuple(piece.prompt_ids)
    full = [(time, piece) for time, piece in pieces if piece.text or piece.ids]
    if full:
        time, end = pieces[-1]
        if end.finish == "length" and (end.tokens_so_far or 0) > (full[-1][1].tokens_so_far or 0):
            full.append((time, end))  # llama-server: the last tokens end inside a character, and hold nothing
        first = next(place for place, (_, piece) in enumerate(pieces) if piece.text or piece.ids)
        reply.oddities["empty"] += first
    # as many ids as tokens so far: each event repeats all of them, as SGLang's do
    repeats = len(full) > 1 and all(piece.ids and len(piece.ids) == piece.tokens_so_far for _, piece in full)
    texts, many = _differences([piece.text for _, piece in full], repeats)
    lists, again = _differences([tuple(piece.ids or ()) for _, piece in full], repeats)
    reply.oddities["cumulative"] += many or again
    has_ids = any(piece.ids for _, piece in full)
    before = seen = 0
    for (time, piece), text, ids in zip(full, texts, lists, strict=True):
        tokens = len(ids) if has_ids else None
        if piece.tokens_so_far is not None:
            tokens, seen = piece.tokens_so_far - before, seen + len(ids)
            if tokens < 0 or piece.tokens_so_far < seen:  # llama-server counts a whole draft before it sends it
                raise Untrue(f"it counts {piece.tokens_so_far} tokens so far, after {before}, and sent {seen}")
            before = piece.tokens_so_far
            reply.oddities["withheld"] += has_ids and tokens > len(ids)
        reply.events.append(Event(time, tokens, ids if has_ids else None, text))


def _differences(values: list[Any], repeats: bool) -> tuple[list[Any], bool]:
    """Return what each value adds, where each begins with the whole one before; else the values as they are. `repeats`:
    they are known to do so, and some may add nothing."""
    least, shortest = (2, 0) if repeats else (CUMULATIVE, 1)
    filled = [value for value in values if value]
    if len(filled) < least or not all(
        len(new) - len(old) >= shortest and new[: len(old)] == old for old, new in pairwise(filled)
    ):
        return values, False
    before, parts = values[0][:0], []
    for value in values:
        parts.append(value[len(before) :])
        before = value or before
    return parts, True


def message(content: Any, name: bytes = b"") -> str | None:
    """Return the error message of an answer, from one of the usual fields; None where there is none."""
    if isinstance(content, dict) and content.get("error"):
        return _words(content["error"])
    if name == b"error" or (isinstance(content, dict) and content.get("object") == "error"):
        return _words(content)
    return None


def _message(content: bytes, secrets: Secrets) -> str:
    try:
        return message(words.parse(content, secrets), b"error") or _short(content)
    except JSON_ERRORS:
        return _short(content)


def _words(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)


def _short(content: bytes) -> str:
    """Return the beginning, longer than what is shown, so that a secret in that is whole."""
    return content[:MAX_SHOWN].decode("utf-8", errors="replace").strip()
