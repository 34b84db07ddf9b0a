"""Send a load to a server, and keep every byte that comes back with the time of its arrival.

Nothing is parsed while the load runs: one core stamps 50,000 to 190,000 arrivals a second (docs/SERVING.md), several
times what a client can that reads each event. One loop, one thread; serving.stream reads the bytes afterwards.
"""

import asyncio
import errno
import gc
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quantmill.client import stream, words
from quantmill.client.connection import LOST, NO_FILES, TIMED_OUT, TOO_LONG, Connection, Exchange, Room
from quantmill.client.event_loop import new_event_loop
from quantmill.client.schedule import Closed, Load, Open
from quantmill.client.urls import wrong_url
from quantmill.common import redaction
from quantmill.common.program import UserError, printable

TICK = 0.01  # seconds between looks at how late the loop is
LATE = 0.001  # seconds that are no stall
FILES_OUT = (errno.EMFILE, errno.ENFILE)  # a connection is a file: the process, or the host, has no more of them
ASK_BUFFER = 64 * 1024  # bytes that are read at once of what is asked outside of loads
REDIRECTIONS = (301, 302, 303, 307, 308)
STALE = 1.0  # seconds after which a connection that waits is not used again: servers close theirs after some


@cache
def _context(authority: Path | None) -> ssl.SSLContext:
    """Made once: to read the system's certificates takes tens of milliseconds, in which the loop stands still."""
    return ssl.create_default_context(cafile=authority)


Connect = Callable[[Callable[[], Connection]], Awaitable[tuple[Any, Connection]]]


@dataclass(frozen=True)
class Target:
    """A server: its URL (`http://host:port`, with a path before its API's where it has one), and how to reach it.

    `token` is sent as a bearer token and stands in no result, log or error. `authority` is a file of certificates to
    trust instead of the system's; certificates are always verified. `reuse`: whether a connection serves several
    requests (`Recording.reusable` tells whether the server lets it).
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
            raise UserError(f"{self.url}: its token holds what no header can; look at the variable that names it")

    def request(self, path: str, body: dict[str, Any] | None) -> bytes:
        """A POST of `body` as JSON, or a GET where that is None."""
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
        """What its certificate is verified by; None where it speaks HTTP."""
        return _context(self.authority) if urlsplit(self.url).scheme == "https" else None

    async def connect(self, factory: Callable[[], Connection]) -> tuple[Any, Connection]:
        """Open a connection. Raises OSError (also ssl.SSLError) or TimeoutError."""
        parts = urlsplit(self.url)
        secure = self.tls()
        port = parts.port or (443 if secure else 80)
        create = asyncio.get_running_loop().create_connection(factory, parts.hostname, port, ssl=secure)
        return await asyncio.wait_for(create, self.connect_timeout)


@dataclass(frozen=True)
class Recording:
    """What a load gave: an exchange for each request, in their order, and how the client itself fared.

    Attributes:
        start, end: of the load, by the client's clock.
        cpu_seconds: processor time of this process meanwhile.
        stall_seconds, longest_stall: time for which the loop stood still, beyond a millisecond each, and the longest.
        clock_step: seconds that the host's calendar clock moved against the clock that times are taken from.
        reusable: whether no connection was closed after an answer without a word, as llama-server does after a stream.
    """

    exchanges: list[Exchange]
    start: float
    end: float
    cpu_seconds: float
    stall_seconds: float
    longest_stall: float
    clock_step: float
    reusable: bool = True

    @property
    def seconds(self) -> float:
        """How long the load took."""
        return self.end - self.start

    @property
    def lags(self) -> list[float]:
        """Seconds from when each request was to be sent to when the client took it up: a connection that is made after
        that waits for the server."""
        return [each.taken - each.intended for each in self.exchanges if each.taken is not None]

    @property
    def arrivals(self) -> int:
        """How often something arrived."""
        return sum(len(each.stamps) for each in self.exchanges)


def run(target: Target, requests: Sequence[bytes], load: Load) -> Recording:
    """Send `requests` (what `Target.request` made) as `load` says, and wait for all answers.

    A request that fails has its reason in its exchange. None is sent twice, but where a connection that had served
    another request was closed before it answered a byte. Raises `ValueError` where a schedule has not one time for each
    request.
    """
    target.tls()  # its certificates are read before, not while a request waits
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(send(target, requests, load, target.connect))


async def send(
    target: Target,
    requests: Sequence[bytes],
    load: Load,
    connect: Connect,
    clock: Callable[[], float] = time.perf_counter,
    calendar: Callable[[], float] = time.time,
) -> Recording:
    """`run` in the loop that runs, over connections that `connect` opens. `clock` must go as fast as the loop's."""
    if isinstance(load, Open) and len(load.times) != len(requests):
        raise ValueError(f"a schedule of {len(load.times)} times for {len(requests)} requests")
    client = _Client(target, requests, connect, clock)
    with _no_garbage_collection():
        at_once = load.slots if isinstance(load, Closed) else load.times.count(0.0)
        await client.open_connections(min(at_once, len(requests)))
        watch = asyncio.ensure_future(client.watch())
        step, cpu, start = calendar() - clock(), time.process_time(), clock()
        try:
            await (client.send_in_slots(load.slots) if isinstance(load, Closed) else client.send_at(load.times))
        finally:
            watch.cancel()
            client.close()
        end, cpu, step = clock(), time.process_time() - cpu, calendar() - clock() - step
    exchanges = [client.exchanges[number] for number in range(len(requests))]
    stalls = client.stall_seconds, client.longest_stall
    return Recording(exchanges, start, end, cpu, *stalls, step, client.reusable)


class Unreachable(Exception):
    """A server does not answer a question, and why, without its token. `status`: of what it answered instead."""

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


def get(target: Target, path: str, limit: int = 2**22) -> bytes:
    """What a server answers to a GET, at most `limit` bytes. Raises `Unreachable` unless its status is 200."""
    return ask(target, path, None, limit, target.connect_timeout)


def ask(
    target: Target, path: str, body: dict[str, Any] | None, limit: int = 2**28, timeout: float | None = None
) -> bytes:
    """What a server answers to one question outside of loads: a POST of `body` as JSON, or a GET where that is None.
    The bytes are as they came; `words.parse` takes secrets out of them.

    `timeout` is for all of it, however slowly it comes, and `limit` for its head too. No proxy is asked, and no
    redirection followed. Raises `Unreachable` unless the status is 200 and the answer is whole. May be called in
    several threads.
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
        head, content = stream.whole(exchange)
    except ValueError as error:
        raise Unreachable(f"no answer (broken HTTP: {error})") from None
    if head.status in REDIRECTIONS:
        raise Unreachable(f"{path} was answered with status {head.status}: it sends its users elsewhere", head.status)
    if head.status != 200:
        said = f"{path} was answered with status {head.status}{_said(content, secrets)}"
        raise Unreachable(said, head.status)
    return content


async def _ask(target: Target, request: bytes, limit: int, seconds: float) -> Exchange:
    """One exchange over a connection of its own; what fails is in its `failure`."""
    exchange = Exchange(0, time.perf_counter())
    buffer = memoryview(bytearray(ASK_BUFFER))
    connection = None
    try:
        async with asyncio.timeout(seconds):
            new = lambda: Connection(time.perf_counter, Room(limit), limit, buffer)  # noqa: E731
            _, connection = await target.connect(new)
            await connection.exchange(exchange, request, seconds)
    except (OSError, TimeoutError) as error:
        exchange.failure = _reason(error, min(seconds, target.connect_timeout) if connection is None else seconds)
    finally:
        if connection:
            connection.close()
    return exchange


def _said(content: bytes, secrets: redaction.Secrets) -> str:
    """The reason in a server's own words, where it gives one as OpenAI's API does; without secrets."""
    try:
        said = words.parse(content, secrets)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f" ({printable(secrets.text(said))[:300]})" if isinstance(said, str) else ""


class _Client:
    def __init__(self, target: Target, requests: Sequence[bytes], connect: Connect, clock: Callable[[], float]) -> None:
        self.target, self.requests, self.connect, self.clock = target, requests, connect, clock
        self.exchanges: dict[int, Exchange] = {}
        self.connections: list[Connection] = []
        self.free: list[Connection] = []
        self.stall_seconds = self.longest_stall = 0.0
        self.reusable = True
        self.room = Room()

    async def open_connections(self, number: int) -> None:
        """Open connections for what is to leave at once. What fails here fails again where it is needed.

        Not more: servers with a thread for each connection (llama-server) have none left for others while some wait.
        """
        made = await asyncio.gather(*(self.new_connection() for _ in range(number)), return_exceptions=True)
        self.free = [each for each in made if isinstance(each, Connection)]

    async def new_connection(self) -> Connection:
        """Open one."""
        _, connection = await self.connect(lambda: Connection(self.clock, self.room))
        self.connections.append(connection)
        return connection

    async def send_in_slots(self, slots: int) -> None:
        """Each slot sends its next request when its last has ended."""
        numbers = iter(range(len(self.requests)))

        async def slot(intended: float) -> None:
            for number in numbers:
                exchange = await self.exchange(number, intended)
                intended = exchange.finished

        start = self.clock()
        await asyncio.gather(*(slot(start) for _ in range(min(slots, len(self.requests)))))

    async def send_at(self, times: Sequence[float]) -> None:
        """Each request leaves at its time."""
        start, tasks = self.clock(), []
        for number, at in enumerate(times):
            wait = start + at - self.clock()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(self.exchange(number, start + at)))
        await asyncio.gather(*tasks)

    async def exchange(self, number: int, intended: float) -> Exchange:
        """Send one request, over a connection that is free or a new one."""
        exchange = self.exchanges[number] = Exchange(number, intended, taken=self.clock())
        while True:
            try:
                connection = self.take() or await self.new_connection()
            except (OSError, TimeoutError) as error:
                reason = f"no connection: {_reason(error, self.target.connect_timeout)}"
                exchange.failure = NO_FILES if getattr(error, "errno", None) in FILES_OUT else reason
                exchange.finished = self.clock()
                return exchange
            again = connection.used
            await connection.exchange(exchange, self.requests[number], self.target.timeout)
            if not (again and exchange.failure == LOST and not exchange.data):
                break
            self.reusable, exchange.failure = False, None
        if connection.usable:
            self.free.append(connection)
        return exchange

    def take(self) -> Connection | None:
        """The connection that was used last and is still open, if it may be used again and has not waited for long."""
        reuse = self.target.reuse and self.reusable
        while self.free:
            connection = self.free.pop()
            if connection.usable and (reuse or not connection.used) and self.clock() - connection.free_since < STALE:
                return connection
            connection.close()
        return None

    async def watch(self) -> None:
        """See how late the loop is, all the time."""
        while True:
            due = self.clock() + TICK
            await asyncio.sleep(TICK)
            late = self.clock() - due
            if late > LATE:
                self.stall_seconds += late
                self.longest_stall = max(self.longest_stall, late)

    def close(self) -> None:
        """Close every connection."""
        for connection in self.connections:
            connection.close()


def _reason(error: BaseException, timeout: float) -> str:
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


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python looks for cycles among all that is kept: half a second with a million objects."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
