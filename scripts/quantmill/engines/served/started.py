"""A server that Quantmill starts with the artifact, on this machine. Its module gives the command line; everything else
is here."""

import atexit
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from quantmill import engines
from quantmill.checkpoint import shards
from quantmill.client.words import Expected
from quantmill.common import redaction, special_tokens
from quantmill.common.program import PACKAGE, UserError
from quantmill.engines.served.served import Served, vocabulary
from quantmill.servers import lifecycle
from quantmill.servers.endpoint import Endpoint

MODEL = "quantmill"  # the model's name in requests


class Started(Served):
    """See `engines.Engine`. Options are those of the server's command line; `-` and `_` mean the same."""

    capabilities = frozenset({"multi_gpu", "own_threads"})
    ours: ClassVar[frozenset[str]] = frozenset()  # options that Quantmill sets itself
    model = MODEL

    def command(
        self, artifact: Path, device: str, threads: int, port: int, options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line that serves the artifact on this port of the loopback interface, and further
        environment variables. Raises `UserError` where the artifact cannot be served."""
        raise NotImplementedError

    def __init__(self, artifact: Path, device: str, threads: int, **options: Any) -> None:
        self.options = options = underscored(options)
        self.check_ours(options)
        config = shards.read_json(artifact / "config.json")
        self.stop_ids = special_tokens.ends(config)
        self.expected = Expected(vocabulary(config))
        self.artifact, self.device = artifact, device
        before = os.sched_getaffinity(0)
        port, (mine, theirs) = lifecycle.free_port(), lifecycle.divide_processors()
        self.threads = min(threads, len(theirs))
        self.argv, environment = self.command(artifact, device, self.threads, port, options)
        said = redaction.of().text(" ".join(self.argv[1:]))  # for results: without paths of this machine
        self.arguments = said.replace(str(artifact.absolute()), artifact.name).replace(str(port), "PORT")
        # named by artifact, engine, options and process: the next such run finds a server that was left behind
        name = f"{artifact.name}@{self.name}"
        settings = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
        folder = artifact.parent / ".servers"
        folder.mkdir(exist_ok=True)
        for record in folder.glob(f"{name}-{settings}-*.json"):
            if not Path("/proc", record.stem.rpartition("-")[2]).exists():  # its process has ended
                lifecycle.wait_for_last(name, record)
                record.unlink(missing_ok=True)
        self.log = folder / f"{name}-{settings}-{os.getpid()}.log"
        self.stack = ExitStack()
        started = lifecycle.start(
            name,
            self.argv,
            port,
            log=self.log,
            record=self.log.with_suffix(".json"),
            health=self.health,
            environment={**environment, **self.environment},
            processors=theirs,
        )
        self.server = self.stack.enter_context(started)
        self.stack.callback(os.sched_setaffinity, 0, before)
        atexit.register(self.close)
        os.sched_setaffinity(0, mine)
        self.target, self.startup_s = self.server.target, self.server.startup_s

    @classmethod
    def check_ours(cls, options: Mapping[str, Any]) -> None:
        """Raise `UserError` for an option that Quantmill sets itself, also if abbreviated, as argparse allows, and for
        one that holds a secret: results show options."""
        secrets = redaction.of()
        for option, value in options.items():
            if any(name.startswith(option) for name in cls.ours):
                raise UserError(f"engine {cls.name}: option {option!r} is set by Quantmill; remove it")
            if (isinstance(value, str) and redaction.is_secret(option)) or secrets.value(value) != value:
                words = "holds a secret, and results show options; put it into the server's environment instead"
                raise UserError(f"engine {cls.name}: option {option!r} {words}")

    def text_config(self) -> dict[str, Any]:
        """Return the language model's keys of config.json as transformers completes them; none of a model that it does
        not know."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.artifact, trust_remote_code=False).get_text_config().to_dict()
        except ValueError:
            return {}

    def check(self) -> None:
        """Raise `UserError` where the server has ended, or another one answers in its place."""
        self.server.check()

    def processes(self) -> set[int]:
        return self.server.processes()

    def close(self) -> None:
        atexit.unregister(self.close)
        self.stack.close()
        self.log.unlink(missing_ok=True)
        if not any(self.log.parent.iterdir()):
            shutil.rmtree(self.log.parent, ignore_errors=True)


class Deployable(Started):
    """A server whose users can start it as it was measured: what `make serve-command` and the card of a published
    artifact print. Modules of such servers import nothing that only their environment has.

    Attributes:
        package: the key of its version in `versions()`.
        program: what starts it where it is installed.
        entrypoint: what starts it in its image, where the image itself starts something else.
    """

    package: ClassVar[str]
    program: ClassVar[str]
    entrypoint: ClassVar[str | None] = None

    @staticmethod
    def words(artifact: Path, place: Endpoint, cards: int, threads: int, options: Mapping[str, Any]) -> list[str]:
        """Return the arguments of its program that serve the artifact there, on `cards` GPUs (0: a CPU)."""
        raise NotImplementedError

    @staticmethod
    def env(cards: int) -> str:
        """Return the environment that has it."""
        raise NotImplementedError

    @classmethod
    def image(cls, recorded: str | None, cards: int) -> tuple[str, str]:
        """Return the container image of a recorded version (None: of the pinned one), and one line about it."""
        raise NotImplementedError

    @staticmethod
    def program_here(python: str) -> str:
        """Return what starts it on this machine; `python` is its environment's."""
        return python

    @staticmethod
    def variables(cards: int) -> dict[str, str]:
        """Return the environment variables that it is started with."""
        return {}


def pin(file: str, package: str) -> str:
    """Return the version of a package that a file of envs/ pins."""
    path = PACKAGE.parents[1] / "envs" / file
    found = re.search(rf"^{package}==([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, path
    return found[1]


def underscored(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with `_` in their names."""
    return {name.replace("-", "_"): value for name, value in options.items()}


def flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line: `--max-num-seqs 64`, `--flag` and `--no-flag`, JSON for lists and mappings."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return found


def deployable(engine: str) -> type[Deployable] | None:
    """Return the class of a server that users can start as it was measured; None for any other engine."""
    try:
        kind = engines.find(engine)
    except ImportError:  # of a library that only its environment has, which no such server imports
        return None
    return kind if issubclass(kind, Deployable) else None
