"""A fake server and what is sent to it, in simulated time."""

from typing import Any

import numpy as np
from fake_model import VOCAB, Model
from fake_server import Server
from timeline import Engine
from virtual import Loop, send

from quantmill.client import checks, stream
from quantmill.client.checks import Counters, Finding, LoadRequest
from quantmill.client.client import Recording
from quantmill.client.dialects import DIALECTS
from quantmill.client.schedule import Closed, Load
from quantmill.client.target import Target
from quantmill.loads import agreement, load_checks

OFFLINE = Model()
NEW, SLOTS, REQUESTS = 16, 4, 80


def prompt(place: int, length: int = 40) -> list[int]:
    return np.random.default_rng(place).integers(2, VOCAB, length).tolist()


class Study:
    """A server and what is sent to it, in simulated time."""

    def __init__(self, *faults: str, dialect: str = "completions", **engine: Any) -> None:
        self.loop = Loop()
        self.server = Server(Engine(self.loop, **engine), faults)
        self.dialect = DIALECTS[dialect]

    def send(self, asked: list[LoadRequest], load: Load, **options: Any) -> tuple[Recording, list[stream.Reply]]:
        target = Target("http://fake")
        bodies = [self.dialect.body("fake", each.prompt, each.new_tokens, True) for each in asked]
        requests = [target.request(self.dialect.path, body) for body in bodies]
        recording = send(self.loop, self.server, requests, load, **options)
        return recording, [stream.read(exchange, self.dialect) for exchange in recording.exchanges]

    def alone(self) -> list[Finding]:
        """One request at a time: new prompts, the same again, and the same with another end."""
        first, again, longer = (
            self.send([LoadRequest([*prompt(place, 200), last], NEW) for place in range(5)], Closed(1))[1]
            for last in (5, 5, 6)
        )
        return agreement.check_repeats(first, again, longer)

    def load(self, load: Load | None = None, **options: Any) -> list[Finding]:
        """Four at a time, and every check of the answers."""
        asked = [LoadRequest(prompt(1000 + place), NEW) for place in range(REQUESTS)]
        before = Counters(**self.server.counters())
        recording, replies = self.send(asked, load or Closed(SLOTS), **options)
        counted = Counters(**self.server.counters()).since(before)
        timelines = [stream.timeline(reply) for reply in replies]
        concurrency = None if load else SLOTS
        found = checks.check_replies(replies, asked)
        if all(reply.ok for reply in replies):
            found += checks.check_counters(counted, replies, cache_off=True)
        found += load_checks.check_load(timelines, concurrency)
        found += load_checks.check_client(recording, timelines, 1e6, scheduled=load is not None)
        return found

    def agree(self, rounds: bool = False) -> list[Finding]:
        """Tokens of four requests at a time, held against those offline."""
        asked = [LoadRequest(prompt(2000 + place), NEW) for place in range(16)]
        (_, replies), (_, alone) = self.send(asked, Closed(SLOTS)), self.send(asked, Closed(1))
        prompts = [each.prompt for each in asked]
        return agreement.check_tokens(replies, alone, prompts, OFFLINE.behind, rounds)


def names(found: list[Finding]) -> set[str]:
    return {finding.fault for finding in found if finding.refuses}


def notes(found: list[Finding]) -> set[str]:
    return {finding.fault for finding in found if not finding.refuses}
