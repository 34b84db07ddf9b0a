"""One question to a server outside of loads: its health, its version, its counters."""

import asyncio
import time
from typing import Any

from quantmill.client import words
from quantmill.client.body import whole
from quantmill.client.connection import TIMED_OUT, TOO_LONG, Connection, Exchange, Room
from quantmill.client.event_loop import new_event_loop
from quantmill.client.target import Target, reason
from quantmill.common import redaction
from quantmill.common.program import printable

ASK_BUFFER = 64 * 1024  # bytes that are read at once
REDIRECTIONS = (301, 302, 303, 307, 308)


class Unreachable(Exception):
    """The reason why a server does not answer a question, without its token. `status`: that of its answer, if any."""

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


def get(target: Target, path: str, limit: int = 2**22) -> bytes:
    """Return the answer to a GET, at most `limit` bytes. Raises `Unreachable` unless its status is 200."""
    return ask(target, path, None, limit, target.connect_timeout)


def ask(
    target: Target, path: str, body: dict[str, Any] | None, limit: int = 2**28, timeout: float | None = None
) -> bytes:
    """Return the answer to a POST of `body` as JSON, or to a GET where that is None. The bytes are as they came;
    `words.parse` removes secrets.

    `timeout` (seconds) covers the whole exchange, and `limit` (bytes) includes the head. No proxy is used and no
    redirection followed. Raises `Unreachable` unless the status is 200 and the answer is whole. Threads may call it at
    the same time.
    """
    seconds = target.timeout if timeout is None else timeout
    target.tls()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        exchange = runner.run(_ask(target, target.request(path, body), limit, seconds))
    secrets = redaction.of(target.token)
    if exchange.failure:
        if exchange.failure.startswith(TOO_LONG):
            raise Unreachable(f"{path} was answered with more than {limit:,} bytes")
        raise Unreachable(f"no answer ({exchange.failure.replace(TIMED_OUT, 'none in')})")
    try:
        head, content = whole(exchange)
    except ValueError as error:
        raise Unreachable(f"no answer (broken HTTP: {error})") from None
    if head.status in REDIRECTIONS:
        raise Unreachable(f"{path} was answered with status {head.status}: it sends its users elsewhere", head.status)
    if head.status != 200:
        said = f"{path} was answered with status {head.status}{_said(content, secrets)}"
        raise Unreachable(said, head.status)
    return content


async def _ask(target: Target, request: bytes, limit: int, seconds: float) -> Exchange:
    """Make one exchange over a connection of its own; a failure is in its `failure`."""
    exchange = Exchange(0, time.perf_counter())
    buffer = memoryview(bytearray(ASK_BUFFER))
    connection = None
    try:
        async with asyncio.timeout(seconds):
            new = lambda: Connection(time.perf_counter, Room(limit), limit, buffer)  # noqa: E731
            _, connection = await target.connect(new)
            await connection.exchange(exchange, request, seconds)
    except (OSError, TimeoutError) as error:
        exchange.failure = reason(error, min(seconds, target.connect_timeout) if connection is None else seconds)
    finally:
        if connection:
            connection.close()
    return exchange


def _said(content: bytes, secrets: redaction.Secrets) -> str:
    """Return a server's own reason, where it gives one as OpenAI's API does; without secrets."""
    try:
        said = words.parse(content, secrets)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f" ({printable(secrets.text(said))[:300]})" if isinstance(said, str) else ""
