"""A server that somebody else runs, found at its URL. Its module says how it is spoken to; everything else is here.

Nobody but its owner can say what it serves and how it was started. So it is asked: for its models' names, its version,
and a few tokens after a short prompt, which must be those of the artifact's tokenizer.
"""

import json
import os
import ssl
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from checkpoint import gguf_file, shards
from common import token_ids
from common.program import UserError
from common.text_config import of_text
from devices import listeners
from llamacpp import files
from serving import client, lifecycle, stream
from serving.dialects import Prompt
from serving.engine import Served
from serving.texts import Texts

PROBES = ("One, two, three, four, five", "Monday, Tuesday", "red, green and blue", "north, east, south and west")
PROBE_TOKENS = 8


class Attached(Served):
    """See `serving.engine.Served`. Options: `url`; `model`, what the server calls it; `token_variable`, the environment
    variable that holds its token; `authority`, a file of certificates to trust instead of the system's."""

    capabilities = frozenset({"own_threads", "batches", "gpus"})
    options: ClassVar = {"url": str, "model": str, "token_variable": str, "authority": str}
    models: ClassVar[str] = "/v1/models"  # where its models' names are
    version: ClassVar[tuple[str, str] | None] = None  # where its version is, and the key
    takes_ids: ClassVar[bool] = True  # whether a prompt is ids, or text
    cache_off: ClassVar[str] = "start it without a cache of prompts"
    compute_type = "unknown"
    startup_s = None

    def __init__(self, artifact: Path, device: str, threads: int, **options: Any) -> None:
        self.name = type(self).__module__.rpartition(".")[2].replace("_", "-")
        if "url" not in options:
            raise UserError(f"engine {self.name}: is a server that somebody else runs; say where with url")
        self.artifact, self.threads = artifact, threads
        config = shards.read_json(artifact / "config.json")
        self.stop_ids = token_ids.ends(config)
        self.vocabulary = of_text(config).get("vocab_size")
        self.target = client.Target(
            options["url"], token=_token(options.get("token_variable")), authority=_authority(options.get("authority"))
        )
        self.check()
        answering = listeners.find(self.target.url)
        self.here = answering is not None and answering.place == "here"
        self.unknown = answering.unknown if answering else None
        self.model = self.find_model(options.get("model"))
        self.probe()

    @cached_property
    def texts(self) -> Texts:
        """The artifact's tokenizer."""
        return Texts(self.artifact)

    def find_model(self, wanted: str | None) -> str:
        """What the server calls what it serves. Raises `UserError` where it serves something else, or several.

        Of a server that cannot list its models, the name is what the run says."""
        try:
            answer = lifecycle.attach(self.target, self.models)
        except UserError:
            if wanted is None:
                raise
            return wanted
        try:
            names = self.names(json.loads(answer))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{self.target.url}: {self.models} tells no models; is it a server of {self.name}?"
            ) from None
        served = ", ".join(names)[:200] or "nothing"
        if wanted is None and len(names) != 1:
            raise UserError(f"{self.target.url}: it serves {served}; name one in the option model")
        if wanted is not None and wanted not in names:
            raise UserError(
                f"{self.target.url}: it serves {served}, not {wanted}; correct the option model, or its url"
            )
        return wanted or names[0]

    def names(self, answer: Any) -> list[str]:
        """What the server says that it serves, of its answer on the path `models`. Raises KeyError or TypeError where
        it is none."""
        return [str(each["id"]) for each in answer["data"]]

    def probe(self, number: int = 0) -> None:
        """Ask for a few tokens, after a prompt of this number: one that was sent before may be kept. Raises `UserError`
        where the server reads or writes other tokens than the artifact's tokenizer."""
        has_tokenizer = not self.takes_ids or (self.artifact / "tokenizer.json").is_file()
        ids = self.texts.encode(PROBES[number]) if has_tokenizer else list(range(2 + number, 10))
        (reply,) = self.ask([ids], PROBE_TOKENS)
        if not self.tells_ids:
            return
        strange = [token for token in reply.ids or () if self.vocabulary is not None and token >= self.vocabulary]
        if strange:
            words = f"it writes token {strange[0]}, and the artifact's vocabulary has {self.vocabulary}"
            raise UserError(f"{self.where()}: another model is served: {words}")
        if has_tokenizer and reply.text and self.texts.decode(reply.ids).strip() != reply.text.strip():
            raise UserError(
                f"{self.where()}: another model is served: its text is not that of its ids by {self.artifact}"
            )

    def prompt(self, ids: list[int]) -> Prompt:
        return ids if self.takes_ids else self.texts.text(ids)

    def ask(self, prompts: Sequence[list[int]], n: int) -> list[stream.Reply]:
        replies = super().ask(prompts, n)
        for reply, ids in zip(replies, prompts, strict=True):
            if reply.finish != "length":
                words = f"ended with {reply.finish!r} after {reply.tokens} tokens where {n} were asked for"
                raise UserError(f"{self.where()}: its server {words}: it does not ignore the end of sequence")
            read = reply.usage.prompt_tokens if reply.usage else None
            if read not in (None, len(ids)):
                words = f"it read {read} tokens where {len(ids)} were sent"
                raise UserError(f"{self.where()}: {words}: it adds or cuts some, or has another model's tokenizer")
            if reply.usage and reply.usage.cached_tokens:
                words = f"{reply.usage.cached_tokens} tokens of a prompt came out of its cache"
                raise UserError(f"{self.where()}: {words}; {self.cache_off}")
        return replies

    def where(self) -> str:
        return f"{self.target.url} ({self.artifact.name})"

    def check(self) -> None:
        lifecycle.attach(self.target, self.health)

    def processes(self) -> set[int]:
        """Those that answer at its url, so that they are no interference; empty where they are not known."""
        found = listeners.find(self.target.url)
        return set(found.pids) if found else set()

    def weight_bytes(self) -> int | None:
        """Of the artifact's files, where the server runs on this machine: they are compared with its bandwidth."""
        if not self.here:
            return None
        if any(self.artifact.glob("*.gguf")):
            return files.bytes_per_token(gguf_file.read_all(files.first(self.artifact)))
        return shards.bytes_per_token(self.artifact) if any(self.artifact.glob("*.safetensors")) else None

    def versions(self) -> dict[str, str]:
        sent = "ids"
        if not self.takes_ids:
            others = len(self.texts.reread)
            sent = "text" + (f", {others} of which it reads as other ids, as many" if others else "")
        told = {self.name: self.told_version(), "model": Path(self.model).name, "prompts": sent}  # without its places
        return told | ({listeners.DISTURBANCE: self.unknown} if self.unknown else {})

    def told_version(self) -> str:
        """Its version; `unknown` where it does not tell."""
        if self.version is None:
            return "unknown"
        path, key = self.version
        try:
            return str(json.loads(client.get(self.target, path))[key])[:100]
        except (client.Unreachable, ValueError, KeyError, TypeError, RecursionError):
            return "unknown"


def _token(variable: str | None) -> str | None:
    """The token in an environment variable. Raises `UserError` where it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UserError(f"option token_variable: the environment variable {variable} is not set; set it to the token")
    return os.environ[variable]


def _authority(file: str | None) -> Path | None:
    """A file of certificates. Raises `UserError` where it holds none."""
    if file is None:
        return None
    try:
        client.Target("https://localhost", authority=Path(file)).tls()
    except OSError as error:
        reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else (error.strerror or "").lower()
        raise UserError(f"option authority: {file}: {reason}; name a file of certificates in PEM") from None
    return Path(file)
