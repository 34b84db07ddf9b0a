"""An engine that is a server, asked over HTTP as its users ask it: what all of them share, whoever started them.

serving.started starts one with the artifact; serving.attached finds one that somebody else runs. One prompt at a time,
or several at once, gives the row's headline figures; scripts/load.py sends loads.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

import engines
from common.program import UserError
from serving import client, prometheus, schedule, stream
from serving.checks import Counters
from serving.dialects import DIALECTS, Prompt

UNKNOWN = -1  # the id of a token that a server does not tell
AT_ONCE = 16  # texts that are scored
REFUSALS = (400, 404, 405, 415, 422, 501)  # of a request that a server does not know


class NotTold(UserError):
    """A server answers, but does not tell how likely a given text is."""


class Served(engines.Engine):
    """See `engines.Engine`.

    Attributes:
        target: how it is reached.
        startup_s: seconds until it was ready; None where somebody else started it.
        model: what requests call what it serves.
    """

    modes = ("served",)
    mode = modes[0]
    dialect: ClassVar[str] = "completions"  # how it is spoken to: `serving.dialects`
    health: ClassVar[str] = "/health"  # answered with 200 as soon as it is ready
    counted: ClassVar[Mapping[str, str]] = {}  # names of `Counters`, and those of its /metrics
    tells_ids: ClassVar[bool] = True  # whether it tells the tokens that it chose
    artifact: Path
    target: client.Target
    startup_s: float | None
    model: str

    def more(self, n: int) -> dict[str, Any]:
        """What a request for n tokens says besides, so that no end-of-sequence token is chosen."""
        return {}

    def prompt(self, ids: list[int]) -> Prompt:
        """A prompt as it is sent."""
        return ids

    def shared_context(self, context: int | None) -> int | None:
        """How many tokens all requests in flight may have together, with their answers, where the server fails those
        that go beyond; None where it lets them wait, or that is not known. `context`: the model's, in tokens."""
        return None

    def counters(self) -> Counters:
        """What the server has counted since its start; nothing where it does not tell."""
        if not self.counted:
            return Counters()
        try:
            told = prometheus.read(client.get(self.target, "/metrics").decode(errors="replace"))
        except client.Unreachable:
            return Counters()
        return Counters(**{name: told.get(metric) for name, metric in self.counted.items()})

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
        where one is not answered so."""
        recording = client.run(self.target, [self.request(ids, n) for ids in prompts], schedule.burst(len(prompts)))
        self.sent = recording.start
        replies = self.read(recording)
        for reply, ids in zip(replies, prompts, strict=True):
            if reply.error or reply.failure:
                self.check()  # the better reason, where it has ended
                raise UserError(f"{self.where()}: its server does not answer ({reply.error or reply.failure})")
            if reply.ids is None:
                self._fill_in(reply, ids, n)
        self.text = None if self.tells_ids else replies[0].text
        return replies

    def many_target_logprobs(self, texts: list[list[int]]) -> Iterator[engines.Targets]:
        with ThreadPoolExecutor(AT_ONCE) as users:
            yield from users.map(self.target_logprobs, texts)

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        """Of servers whose dialect has a `likelihood`. Raises `NotTold` where it refuses the request or its answer
        lacks the figures, `UserError` where it does not answer."""
        dialect = DIALECTS[self.dialect]
        if dialect.likelihood is None:
            raise NotImplementedError
        try:
            content = json.loads(client.ask(self.target, dialect.path, dialect.likelihood.body(self.model, ids)))
            return dialect.likelihood.read(content, ids)
        except client.Unreachable as error:
            self.check()
            kind = NotTold if error.status in REFUSALS else UserError
            raise kind(f"{self.where()}: its server does not answer ({error})") from None
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError):
            raise NotTold(f"{self.where()}: its server does not tell how likely each token of a text is") from None

    def request(self, ids: list[int], n: int) -> bytes:
        """One request for n tokens, streamed."""
        return self.target.request(DIALECTS[self.dialect].path, self._body(ids, n, stream=True))

    def read(self, recording: client.Recording) -> list[stream.Reply]:
        """What came back for each request."""
        return [stream.read(each, DIALECTS[self.dialect], self.target.token) for each in recording.exchanges]

    def check(self) -> None:
        """Raises `UserError` where the server has ended, or another one answers in its place."""

    def where(self) -> str:
        """What errors begin with."""
        return str(self.artifact)

    def _body(self, ids: list[int], n: int, stream: bool) -> dict[str, Any]:
        return DIALECTS[self.dialect].body(self.model, self.prompt(ids), n, stream) | self.more(n)

    def _fill_in(self, reply: stream.Reply, prompt: list[int], n: int) -> None:
        """Give the events of a reply the ids that they lack. Raises `UserError` where that cannot be.

        A server that tells ids, but withholds some in its stream (llama-server does, of a token whose text ends inside
        of a character), is asked again, not streamed; the stream's times and counts stay. Of one that tells none, the
        tokens are spread evenly over the events that brought text.
        """
        if not self.tells_ids:
            self.spread(reply, n)
            return
        whole = None
        if reply.oddities["withheld"]:
            try:
                answer = client.ask(self.target, DIALECTS[self.dialect].path, self._body(prompt, n, stream=False))
            except client.Unreachable as error:
                raise UserError(f"{self.where()}: its server does not answer ({error})") from None
            whole = DIALECTS[self.dialect].read(json.loads(answer)).ids
        if whole is None or len(whole) != reply.tokens:
            raise UserError(f"{self.where()}: its server does not tell the tokens that it chose")
        ids = iter(whole)
        reply.events = [each._replace(ids=tuple(islice(ids, each.tokens or 0))) for each in reply.events]
        reply.oddities["withheld"] = 0

    def spread(self, reply: stream.Reply, n: int) -> None:
        """Spread n tokens over the events of a reply without ids. Raises `UserError` where there are not n."""
        told = reply.usage.new_tokens if reply.usage else None
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
