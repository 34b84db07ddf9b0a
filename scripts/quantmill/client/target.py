"""The address of a server: its URL, its token, and the certificates that verify it."""

import asyncio
import json
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quantmill.client.connection import Connection
from quantmill.client.urls import wrong_url
from quantmill.common.program import UserError


@cache
def _context(authority: Path | None) -> ssl.SSLContext:
    """Make a context once: reading the system's certificates stops the loop for tens of milliseconds."""
    return ssl.create_default_context(cafile=authority)


Connect = Callable[[Callable[[], Connection]], Awaitable[tuple[Any, Connection]]]


@dataclass(frozen=True)
class Target:
    """A server: its URL (`http://host:port`, with a path before its API's if any), and how to reach it.

    `token` is sent as a bearer token and is in no result, log or error. `authority` is a file of certificates to trust
    instead of the system's; certificates are always verified. `reuse`: whether a connection serves several requests
    (`Recording.reusable` says whether the server allows it).
    """

    url: str
    token: str | None = field(default=None, repr=False)
    authority: Path | None = None
    connect_timeout: float = 10.0
    timeout: float = 600.0  # seconds for a whole request
    reuse: bool = True

    def __post_init__(self) -> None:
        if why := wrong_url(self.url):
            raise UserError(f"url: {why}")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise UserError(f"{self.url}: its token cannot be sent in a header; check the variable that names it")

    def request(self, path: str, body: dict[str, Any] | None) -> bytes:
        """Return a POST of `body` as JSON, or a GET where that is None."""
        parts = urlsplit(self.url)
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{'GET' if body is None else 'POST'} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Accept: text/event-stream, application/json",
            *([] if body is None else ["Content-Type: application/json", f"Content-Length: {len(content)}"]),
            *([f"Authorization: Bearer {self.token}"] if self.token else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content

    def tls(self) -> ssl.SSLContext | None:
        """Return what verifies its certificate; None for HTTP."""
        return _context(self.authority) if urlsplit(self.url).scheme == "https" else None

    async def connect(self, factory: Callable[[], Connection]) -> tuple[Any, Connection]:
        """Open a connection. Raises OSError (also ssl.SSLError) or TimeoutError."""
        parts = urlsplit(self.url)
        secure = self.tls()
        port = parts.port or (443 if secure else 80)
        create = asyncio.get_running_loop().create_connection(factory, str(parts.hostname), port, ssl=secure)
        return await asyncio.wait_for(create, self.connect_timeout)


def reason(error: BaseException, timeout: float) -> str:
    """Return why a server was not reached within `timeout` seconds."""
    if isinstance(error, TimeoutError):
        return f"none in {timeout:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, socket.gaierror):
        return (error.strerror or "no such host").lower()
    if numbers := re.findall(r"\[Errno (\d+)\]", str(error)):  # of several addresses
        return os.strerror(int(numbers[-1])).lower()
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno).lower()
    return str(error)
