"""An engine that is a server, asked over HTTP as its users ask it: what started and attached servers share.

`served.started` starts one with the artifact; `engines.attached` finds one that its user runs. One prompt at a time, or
several at once, gives the row's headline figures; loads.measure sends loads.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from quantmill import engines
from quantmill.checkpoint import gguf_file, shards
from quantmill.client import client, prometheus, query, schedule, stream, together, words
from quantmill.client.checks import Counters
from quantmill.client.connection import Exchange
from quantmill.client.dialects import DIALECTS, Prompt
from quantmill.client.likelihood import TOP
from quantmill.client.target import Target
from quantmill.client.words import ANYTHING, Expected, Untrue
from quantmill.common import redaction
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError, printable
from quantmill.llamacpp import files

UNKNOWN = -1  # the id of a token that a server does not report
AT_ONCE = 16  # texts that are scored at the same time
# bounds of an answer with the log-probabilities of a text: bytes and values for each token
TOKEN_BYTES, TOKEN_VALUES = 512 * (TOP + 2), 8 * (TOP + 2)
ANSWER_BYTES, ANSWER_VALUES = 2**20, 10_000  # and for the rest
REFUSALS = (400, 404, 405, 415, 422, 501)  # statuses for a request that a server does not support


class NotTold(UserError):
    """A server answers, but does not report the log-probabilities of a given text."""


class Objection(UserError):
    """A server's answer rules its row out, in whatever way it is asked."""


class Contradiction(Objection):
    """A server's answer cannot be true of the artifact."""


class Served(engines.Engine):
    """See `engines.Engine`.

    Attributes:
        target: how it is reached.
        startup_s: seconds until it was ready; None where its user started it.
        model: the model's name in requests.
        expected: what its answers are checked against.
    """

    modes = ("served",)
    dialect = "completions"  # how it is spoken to: a key of `client.dialects.DIALECTS`
    health = "/health"  # answers 200 as soon as it is ready
    counted: Mapping[str, str] = {}  # names of `Counters`, and those of its /metrics
    tells_ids = True  # whether it returns the ids of its tokens
    artifact: Path
    target: Target
    startup_s: float | None
    model: str
    expected: Expected = ANYTHING

    def more(self, n: int) -> dict[str, Any]:
        """Return further fields of a request for n tokens, so that no end-of-sequence token is chosen."""
        return {}

    def prompt(self, ids: list[int]) -> Prompt:
        """Return a prompt as it is sent."""
        return ids

    def shared_context(self, context: int | None) -> int | None:
        """Return how many tokens all requests in flight may have together, with their answers, where the server fails
        those beyond; None where it lets them wait, or that is not known. `context`: the model's, in tokens."""
        return None

    def counters(self) -> Counters:
        """Return what the server has counted since its start; empty where it does not report it."""
        if not self.counted:
            return Counters()
        try:
            told = prometheus.read(query.get(self.target, "/metrics").decode(errors="replace"))
        except query.Unreachable:
            return Counters()
        counted = {name: told.get(metric) for name, metric in self.counted.items()}
        for name, value in counted.items():
            if value is not None and not 0 <= value < float("inf"):
                raise Contradiction(f"{self.where()}: /metrics reports {self.counted[name]} {value:g}, not a count")
        return Counters(**counted)

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        yield from sorted(
            (
                (number, token, event.time)
                for number, reply in enumerate(self.ask(prompts, n))
                for event in reply.events
                for token in event.ids or ()
            ),
            key=lambda each: each[2],
        )

    def ask(self, prompts: Sequence[list[int]], n: int) -> list[stream.Reply]:
        """Send the prompts at once, and wait for n tokens after each, each with its id or `UNKNOWN`. Raises `UserError`
        for any other answer."""
        recording = client.run(self.target, [self.request(ids, n) for ids in prompts], schedule.burst(len(prompts)))
        self.sent = recording.start
        replies = self.read(recording)
        for reply, ids in zip(replies, prompts, strict=True):
            if reply.untrue:
                raise Contradiction(f"{self.where()}: {reply.error}; start it with this artifact, or correct its url")
            if reply.error or reply.failure:
                self.check()  # a better reason, if it has ended
                raise UserError(f"{self.where()}: its server does not answer ({reply.error or reply.failure})")
            if reply.ids is None:
                self._fill_in(reply, ids, n)
            self.compare(reply, ids)
        self.text = None if self.tells_ids else replies[0].text
        return replies

    def compare(self, reply: stream.Reply, prompt: list[int]) -> None:
        """Compare a server's counts with what was sent and received. Raises `Contradiction` where they differ."""
        usage = reply.usage
        read = usage.prompt_tokens
        if reply.prompt_ids is not None and list(reply.prompt_ids) != prompt and self.prompt(prompt) == prompt:
            read = len(reply.prompt_ids)
            if read == len(prompt):
                raise Contradiction(f"{self.where()}: it read other tokens than were sent")
        if read not in (None, len(prompt)):
            said = f"it read {read} tokens where {len(prompt)} were sent"
            raise Contradiction(f"{self.where()}: {said}: it adds or cuts some, or has another model's tokenizer")
        whole = reply.finish == "length"  # some servers count an end of sequence
        if whole and None not in (usage.new_tokens, reply.tokens) and usage.new_tokens != reply.tokens:
            said = f"it counts {usage.new_tokens} new tokens where {reply.tokens} came"
            raise Contradiction(f"{self.where()}: {said}: its usage is wrong")

    def target_logprobs_batch(self, texts: list[list[int]]) -> Iterator[engines.Targets]:
        yield from together.each(self.target_logprobs, texts, AT_ONCE)

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        """See `engines.Engine`; for servers whose dialect has a `likelihood`. Raises `NotTold` where the server refuses
        the request or its answer lacks the figures, `Contradiction` where these cannot be true, `UserError` where it
        does not answer."""
        dialect = DIALECTS[self.dialect]
        if dialect.likelihood is None:
            raise NotImplementedError
        body, size = dialect.likelihood.body(self.model, ids), ANSWER_BYTES + TOKEN_BYTES * len(ids)
        try:
            answer = query.ask(self.target, dialect.path, body, size)
        except query.Unreachable as error:
            self.check()
            kind = NotTold if error.status in REFUSALS else UserError
            raise kind(f"{self.where()}: its server does not answer ({error})") from None
        try:
            secrets = redaction.of(self.target.token)
            content = words.parse(answer, secrets, size, ANSWER_VALUES + TOKEN_VALUES * len(ids))
            if (said := stream.message(content)) is not None:
                raise NotTold(f"{self.where()}: its server does not answer ({printable(said)[: stream.MAX_ERROR]})")
            told = dialect.likelihood.read(content, ids)
            if told is None:
                raise NotTold(f"{self.where()}: its server does not report the log-probabilities of a text")
            piece = words.check(dialect.read(content), self.expected)
            found = words.targets(told, ids, self.expected.vocabulary, TOP)
        except Untrue as error:
            said = f"{error}; its probabilities are not those of this artifact"
            raise Contradiction(f"{self.where()}: {said}; correct the server, or its url") from None
        except stream.JSON_ERRORS:
            said = "its log-probabilities of a text cannot be read"
            raise Contradiction(f"{self.where()}: {said}; is it a server of that kind?") from None
        read = piece.usage.prompt_tokens if piece.usage else None
        if read not in (None, len(ids)):
            raise Contradiction(f"{self.where()}: it read {read} tokens where {len(ids)} were sent to be scored")
        return found

    def told_version(self, path: str, key: str) -> str:
        """Return its version, which it reports at `path` as `key`; `unknown` where it does not."""
        try:
            said = words.parse(query.get(self.target, path), redaction.of(self.target.token))[key]
        except (query.Unreachable, *stream.JSON_ERRORS):
            return "unknown"
        return printable(said)[:100] if isinstance(said, str) else "unknown"

    def weight_bytes(self) -> int | None:
        if any(self.artifact.glob("*.gguf")):
            return files.bytes_per_token(gguf_file.read_all(files.first(self.artifact)))
        return shards.bytes_per_token(self.artifact) if any(self.artifact.glob("*.safetensors")) else None

    def request(self, ids: list[int], n: int) -> bytes:
        """Return one request for n tokens, streamed."""
        return self.target.request(DIALECTS[self.dialect].path, self._body(ids, n, stream=True))

    def read(self, recording: client.Recording) -> list[stream.Reply]:
        """Return the reply to each request."""
        return [self._read(each) for each in recording.exchanges]

    def check(self) -> None:
        """Raise `UserError` where the server has ended, or another one answers in its place."""

    def where(self) -> str:
        """Return what errors begin with."""
        return str(self.artifact)

    def _read(self, exchange: Exchange) -> stream.Reply:
        return stream.read(exchange, DIALECTS[self.dialect], self.target.token, self.expected)

    def _body(self, ids: list[int], n: int, stream: bool) -> dict[str, Any]:
        return DIALECTS[self.dialect].body(self.model, self.prompt(ids), n, stream) | self.more(n)

    def _fill_in(self, reply: stream.Reply, prompt: list[int], n: int) -> None:
        """Give the events of a reply the ids that they lack. Raises `UserError` where that is not possible.

        A server that returns ids, but withholds some in its stream (llama-server does, of a token whose text ends
        inside a character), is asked again without streaming; the stream's times and counts stay. For one that returns
        no ids, the tokens are spread evenly over the events with text.
        """
        if not self.tells_ids:
            self.spread(reply, n)
            return
        if not reply.oddities["withheld"]:
            raise UserError(f"{self.where()}: its server does not return the ids of its tokens")
        request = self.target.request(DIALECTS[self.dialect].path, self._body(prompt, n, stream=False))
        (exchange,) = client.run(self.target, [request], schedule.burst(1)).exchanges
        whole = self._read(exchange)
        if whole.untrue or not whole.ok:
            kind = Contradiction if whole.untrue else UserError
            raise kind(f"{self.where()}: its server does not answer ({whole.error or whole.failure or 'no end'})")
        self.compare(whole, prompt)
        if whole.ids is None or len(whole.ids) != reply.tokens:
            raise UserError(f"{self.where()}: its server does not return the ids of its tokens")
        ids = iter(whole.ids)
        events = [each._replace(ids=tuple(islice(ids, each.tokens or 0))) for each in reply.events]
        for old, new in zip(reply.events, events, strict=True):
            rest = iter(new.ids or ())
            if not all(token in rest for token in old.ids or ()):  # in order
                raise Contradiction(f"{self.where()}: it chooses other tokens when it is asked again: it samples")
        reply.events = events
        reply.oddities["withheld"] = 0

    def spread(self, reply: stream.Reply, n: int) -> None:
        """Spread n tokens over the events of a reply without ids. Raises `UserError` where there are not n tokens."""
        told = reply.usage.new_tokens
        if reply.finish != "length" or told not in (None, n) or not reply.events:
            words = f"{told} tokens" if told is not None else f"{len(reply.events)} events"
            raise UserError(
                f"{self.where()}: its server ended with {reply.finish!r} after {words} where {n} were asked for: it "
                "does not ignore the end of sequence"
            )
        ends = [-(-(place + 1) * n // len(reply.events)) for place in range(len(reply.events))]  # the first has one
        counts = [end - begin for begin, end in pairwise([0, *ends])]
        reply.events = [
            event._replace(tokens=count, ids=(UNKNOWN,) * count)
            for event, count in zip(reply.events, counts, strict=True)
        ]


def vocabulary(config: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size in a config.json; None where it has none."""
    found = of_text(config).get("vocab_size")
    return found if type(found) is int and found > 0 else None
