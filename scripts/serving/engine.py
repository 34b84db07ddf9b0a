"""An engine that is a server: started with the artifact, asked over HTTP as its users ask it.

Its module says its command line; everything else is here. One prompt at a time, or several at once, gives the row's
headline figures; loads are sent by scripts/load.py.
"""

import atexit
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import engines
from checkpoint import shards
from common import token_ids
from common.program import UserError
from serving import client, lifecycle, schedule, stream
from serving.dialects import DIALECTS

MODEL = "quantmill"  # what requests call it


class Served(engines.Engine):
    """See `engines.Engine`. Options are those of the server's command line, in its words, with `_` for `-`."""

    capabilities = frozenset({"batches", "gpus", "own_threads"})
    modes = ("served",)
    mode = modes[0]
    dialect: ClassVar[str] = "completions"  # how it is spoken to: `serving.dialects`
    health: ClassVar[str] = "/health"  # answered with 200 as soon as it is ready

    def command(
        self, artifact: Path, device: str, threads: int, port: int, options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        """The command line that serves the artifact on this port of the loopback interface, and what its environment
        says besides. Raises `UserError` where it cannot."""
        raise NotImplementedError

    def more(self, n: int) -> dict[str, Any]:
        """What a request for n tokens says besides, so that no end-of-sequence token is chosen."""
        return {}

    def __init__(self, artifact: Path, device: str, threads: int, **options: Any) -> None:
        config = shards.read_json(artifact / "config.json")
        self.stop_ids = token_ids.select(config.get("eos_token_id"), config.get("vocab_size"))
        self.artifact = artifact
        port, (ours, theirs) = lifecycle.free_port(), lifecycle.divide_processors()
        threads = min(threads, len(theirs))
        self.argv, environment = self.command(artifact, device, threads, port, options)
        said = " ".join(self.argv[1:])  # for results: without this machine's places
        self.arguments = said.replace(str(artifact.absolute()), artifact.name).replace(str(port), "PORT")
        # by what is served and how: the next run of the same finds a server that was left behind
        name = f"{artifact.name}@{type(self).__module__.rpartition('.')[2]}"
        settings = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
        folder = artifact.parent / ".servers"
        folder.mkdir(exist_ok=True)
        self.log = folder / f"{name}-{settings}.log"
        self.stack = ExitStack()
        started = lifecycle.start(
            name,
            self.argv,
            port,
            log=self.log,
            record=self.log.with_suffix(".json"),
            health=self.health,
            environment=environment,
            processors=theirs,
        )
        self.server = self.stack.enter_context(started)
        atexit.register(self.close)
        os.sched_setaffinity(0, ours)
        self.target = self.server.target

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

    def ask(self, prompts: list[list[int]], n: int) -> list[stream.Reply]:
        """Send the prompts at once, and wait for n tokens after each. Raises `UserError` where one is not answered."""
        dialect = DIALECTS[self.dialect]
        bodies = [dialect.body(MODEL, ids, n, True) | self.more(n) for ids in prompts]
        requests = [self.target.request(dialect.path, body) for body in bodies]
        recording = client.run(self.target, requests, schedule.burst(len(requests)))
        self.sent = recording.start
        replies = [stream.read(exchange, dialect, self.target.token) for exchange in recording.exchanges]
        for reply in replies:
            if reply.error or reply.failure:
                self.server.check()  # the better reason, where it has ended
                raise UserError(f"{self.artifact}: its server does not answer ({reply.error or reply.failure})")
            if reply.ids is None:
                raise UserError(f"{self.artifact}: its server does not tell the tokens that it chose")
        return replies

    def processes(self) -> set[int]:
        return self.server.processes()

    def close(self) -> None:
        atexit.unregister(self.close)
        self.stack.close()


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line: `--max-num-seqs 64`, `--flag` and `--no-flag`, JSON for what has parts."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return found


def python() -> list[str]:
    """This environment's interpreter, for servers that are Python programs."""
    return [sys.executable]
