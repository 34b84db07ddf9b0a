"""A fake server and what is sent to it, in simulated time."""

from typing import Any

import numpy as np
from fake_model import BOS, VOCAB, Model, text
from fake_server import KEPT, Server
from timeline import Engine
from virtual import Loop, send

from serving import agreement, checks, load_checks, stream
from serving.checks import Asked, Counters, Finding
from serving.client import Recording, Target
from serving.dialects import DIALECTS
from serving.schedule import Closed, Load

OFFLINE = Model()
NEW, SLOTS, REQUESTS = 16, 4, 80
RIVALS = {"a_token_before_the_prompt": lambda ids: [BOS, *ids], "a_prompt_cut_on_the_left": lambda ids: ids[-KEPT:]}


def prompt(place: int, length: int = 40) -> list[int]:
    return np.random.default_rng(place).integers(2, VOCAB, length).tolist()


class Study:
    """A server and what is sent to it, in simulated time."""

    def __init__(self, *faults: str, dialect: str = "completions", **engine: Any) -> None:
        self.loop = Loop()
        self.server = Server(Engine(self.loop, **engine), faults)
        self.dialect = DIALECTS[dialect]

    def send(self, asked: list[Asked], load: Load, **options: Any) -> tuple[Recording, list[stream.Reply]]:
        target = Target("http://fake")
        bodies = [self.dialect.body("fake", each.prompt, each.new_tokens, True) for each in asked]
        requests = [target.request(self.dialect.path, body) for body in bodies]
        recording = send(self.loop, self.server, requests, load, **options)
        return recording, [stream.read(exchange, self.dialect) for exchange in recording.exchanges]

    def alone(self) -> list[Finding]:
        """One request at a time: new prompts, the same again, and the same with another end."""
        first, again, longer = (
            self.send([Asked([*prompt(place, 200), last], NEW) for place in range(5)], Closed(1))[1]
            for last in (5, 5, 6)
        )
        found = agreement.check_repeats(first, again, longer)
        if not found:
            found += agreement.check_tokens(
                first, [[*prompt(place, 200), 5] for place in range(5)], OFFLINE.behind, "alone", RIVALS
            )
        return found

    def load(self, load: Load | None = None, **options: Any) -> list[Finding]:
        """Four at a time, and every check of the answers."""
        asked = [Asked(prompt(1000 + place), NEW) for place in range(REQUESTS)]
        before = Counters(**self.server.counters())
        recording, replies = self.send(asked, load or Closed(SLOTS), **options)
        counted = Counters(**self.server.counters()).since(before)
        timelines = [stream.timeline(reply) for reply in replies]
        concurrency = None if load else SLOTS
        found = checks.check_replies(replies, asked) + checks.check_text(replies, text)
        if all(reply.ok for reply in replies):
            found += checks.check_counters(counted, replies, cache_off=True)
        found += load_checks.check_load(timelines, concurrency)
        found += load_checks.check_client(recording, timelines, 1e6, scheduled=load is not None)
        return found

    def agree(self, context: agreement.Context) -> list[Finding]:
        """Tokens of four requests at a time against those offline."""
        asked = [Asked(prompt(2000 + place), NEW) for place in range(16)]
        _, replies = self.send(asked, Closed(SLOTS))
        return agreement.check_tokens(replies, [each.prompt for each in asked], OFFLINE.behind, context, RIVALS)


def names(found: list[Finding]) -> set[str]:
    return {finding.fault for finding in found if finding.refuses}


def notes(found: list[Finding]) -> set[str]:
    return {finding.fault for finding in found if not finding.refuses}
