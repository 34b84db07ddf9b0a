"""A server that its user runs, at a URL. `served.attached_servers` says how each is spoken to.

It is asked for its models' names, its version, and a few tokens after a short prompt, which must be those of the
artifact's tokenizer.
"""

import os
import ssl
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from quantmill.checkpoint import shards
from quantmill.client import stream, words
from quantmill.client.dialects import Prompt
from quantmill.client.target import Target
from quantmill.client.text_prompts import Texts
from quantmill.client.words import Expected
from quantmill.common import redaction, special_tokens
from quantmill.common.program import UserError, printable
from quantmill.devices import listeners
from quantmill.engines.served.attached_servers import SERVERS
from quantmill.engines.served.served import Contradiction, Objection, Served, vocabulary
from quantmill.servers import lifecycle

PROBES = ("One, two, three, four, five", "Monday, Tuesday", "red, green and blue", "north, east, south and west")
PROBE_TOKENS = 8


class Engine(Served):
    """See `engines.served.Served`. Options: `url`; `model`, the server's name of it; `token_variable`, the environment
    variable that holds its token; `authority`, a file of certificates to trust instead of the system's."""

    capabilities = frozenset({"own_threads", "batches", "multi_gpu"})
    takes_ids: bool  # whether a prompt is ids, or text
    compute_type = "unknown"
    startup_s = None
    proved = True  # whether it reported the number of ids of every prompt

    def __init__(
        self,
        artifact: Path,
        device: str,
        threads: int,
        url: str = "",
        model: str | None = None,
        token_variable: str | None = None,
        authority: str | None = None,
    ) -> None:
        if not url:
            raise UserError(f"engine {self.name}: needs the address of a running server; add url: http://HOST:PORT")
        self.artifact, self.threads = artifact, threads
        self.server = SERVERS[self.name]
        self.dialect, self.health, self.counted = self.server.dialect, self.server.health, self.server.counted
        self.takes_ids, self.tells_ids = self.server.takes_ids, self.server.tells_ids
        if self.server.likelihood:
            self.capabilities |= {"target_logprobs"}
        config = shards.read_json(artifact / "config.json")
        self.stop_ids = special_tokens.ends(config)
        self.target = Target(url, token=_token(token_variable), authority=_authority(authority))
        self.check()
        answering = listeners.find(self.target.url)
        self.here = answering is not None and answering.place == "here"
        self.unknown = answering.unknown if answering else None
        self.listed, self.model = self.find_model(model)
        self.expected = Expected(vocabulary(config), self.model)
        self.probe()

    @cached_property
    def texts(self) -> Texts:
        """The artifact's tokenizer."""
        return Texts(self.artifact)

    def find_model(self, wanted: str | None) -> tuple[bool, str]:
        """Return whether the server lists its models, and its name of the model. Raises `UserError` where it serves
        another one, or several.

        If a server cannot list its models, the run says the name, which its answers must then repeat."""
        try:
            answer = lifecycle.attach(self.target, self.server.models)
        except UserError:
            if wanted is None:
                raise
            return False, wanted
        try:
            content, named = words.parse(answer, redaction.of(self.target.token)), self.server.named
            names = [content[named]] if named else [each["id"] for each in content["data"]]
            if not all(isinstance(each, str) and 0 < len(each) <= words.MAX_WORD for each in names):
                raise TypeError
        except stream.JSON_ERRORS:
            raise UserError(
                f"{self.target.url}: {self.server.models} lists no models; is it a server of {self.name}?"
            ) from None
        served = printable(", ".join(names)[:200]) or "nothing"
        if wanted is None and len(names) != 1:
            raise UserError(f"{self.target.url}: it serves {served}; name one in the option model")
        if wanted is not None and wanted not in names:
            raise UserError(
                f"{self.target.url}: it serves {served}, not {wanted}; correct the option model, or its url"
            )
        return True, wanted or names[0]

    def more(self, n: int) -> dict[str, Any]:
        return dict(self.server.more)

    def probe(self, number: int = 0) -> None:
        """Ask for a few tokens after probe `number`; one that was sent before may be in a cache. Raises `UserError`
        where the server reads or writes other tokens than the artifact's tokenizer."""
        has_tokenizer = not self.takes_ids or (self.artifact / "tokenizer.json").is_file()
        ids = self.texts.encode(PROBES[number]) if has_tokenizer else list(range(2 + number, 10))
        (reply,) = self.ask([ids], PROBE_TOKENS)
        if not self.listed and reply.model is None:
            raise Contradiction(
                f"{self.where()}: it neither lists its models nor names one in an answer, so nothing shows that it "
                f"serves {self.model}; use a server that does"
            )
        told = reply.ids if self.tells_ids else None
        if told and has_tokenizer and reply.text and self.texts.decode(told).strip() != reply.text.strip():
            raise Contradiction(
                f"{self.where()}: another model is served: its text is not that of its ids by {self.artifact}"
            )

    def spread(self, reply: stream.Reply, n: int) -> None:
        told = reply.usage.new_tokens
        if self.server.recounts and told is not None and abs(told - n) <= max(2, n // 10):
            reply.usage, reply.finish = reply.usage._replace(new_tokens=n), "length"
        super().spread(reply, n)

    def prompt(self, ids: list[int]) -> Prompt:
        return ids if self.takes_ids else self.texts.text(ids)

    def ask(self, prompts: Sequence[list[int]], n: int) -> list[stream.Reply]:
        replies = super().ask(prompts, n)
        for reply in replies:
            if reply.finish != "length":
                said = f"ended with {reply.finish!r} after {reply.tokens} tokens where {n} were asked for"
                raise Objection(f"{self.where()}: its server {said}: it does not ignore the end of sequence")
            if reply.tokens != n:
                raise Contradiction(f"{self.where()}: its server wrote {reply.tokens} tokens where {n} were asked for")
            self.proved &= reply.usage.prompt_tokens is not None
            if reply.usage.cached_tokens:
                said = f"{reply.usage.cached_tokens} tokens of a prompt came out of its cache"
                raise Objection(f"{self.where()}: {said}; {self.server.cache_off}")
        return replies

    def where(self) -> str:
        return f"{self.target.url} ({self.artifact.name})"

    def check(self) -> None:
        lifecycle.attach(self.target, self.health)

    def processes(self) -> set[int]:
        """Return the processes that answer at its url, which are not interference; none where they are not known."""
        found = listeners.find(self.target.url)
        return set(found.pids) if found else set()

    def weight_bytes(self) -> int | None:
        """Return the bytes in the artifact's files, where the server runs on this machine, whose bandwidth they are
        compared with."""
        return super().weight_bytes() if self.here else None

    def versions(self) -> dict[str, str]:
        sent = "ids"
        if not self.takes_ids:
            others = len(self.texts.reread)
            sent = "text" + (f", {others} of which it reads as other ids, as many" if others else "")
        version = self.told_version(*self.server.version) if self.server.version else "unknown"
        told = {self.name: version, "model": Path(self.model).name, "prompts": sent}  # without its path
        told |= {} if self.takes_ids or self.proved else {"prompts' ids": "not told"}
        return told | ({listeners.DISTURBANCE: self.unknown} if self.unknown else {})


def _token(variable: str | None) -> str | None:
    """Return the token in an environment variable. Raises `UserError` where it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UserError(f"option token_variable: the environment variable {variable} is not set; set it to the token")
    return os.environ[variable]


def _authority(file: str | None) -> Path | None:
    """Return a file of certificates. Raises `UserError` where it holds none."""
    if file is None:
        return None
    try:
        Target("https://localhost", authority=Path(file)).tls()
    except OSError as error:
        reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else (error.strerror or "").lower()
        raise UserError(f"option authority: {file}: {reason}; name a file of certificates in PEM") from None
    return Path(file)
