"""Send a load to a server, and keep every byte that comes back with the time of its arrival.

Nothing is parsed while the load runs: one core stamps 50,000 to 190,000 arrivals per second (docs/SERVING.md), several
times as many as if it parsed each event. One loop, one thread; `stream` reads the bytes afterwards.
"""

import asyncio
import errno
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantmill.client.connection import LOST, NO_FILES, Connection, Exchange, Room
from quantmill.client.event_loop import new_event_loop
from quantmill.client.schedule import Closed, Load, Open
from quantmill.client.target import Connect, Target, reason

TICK = 0.01  # seconds between checks of how late the loop is
LATE = 0.001  # seconds of delay that are not a stall
FILES_OUT = (errno.EMFILE, errno.ENFILE)  # a connection is a file: the process or the host has no more
STALE = 1.0  # seconds after which an idle connection is not reused: servers close theirs after some


@dataclass(frozen=True)
class Recording:
    """The result of a load: an exchange for each request, in order, and how the client itself did.

    Attributes:
        start, end: of the load, by the client's clock.
        cpu_seconds: processor time of this process meanwhile.
        stall_seconds, longest_stall: time for which the loop stood still, counting stalls over 1 ms, and the longest.
        clock_step: seconds that the host's calendar clock moved against the clock that times are taken from.
        reusable: whether the server kept connections open; llama-server closes them silently after a stream.
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
        """Return how long the load took."""
        return self.end - self.start

    @property
    def lags(self) -> list[float]:
        """Return the seconds from when each request was to be sent to when the client began with it; a connection made
        after that waits for the server."""
        return [each.taken - each.intended for each in self.exchanges if each.taken is not None]

    @property
    def arrivals(self) -> int:
        """Return the number of arrivals."""
        return sum(len(each.stamps) for each in self.exchanges)


def run(target: Target, requests: Sequence[bytes], load: Load) -> Recording:
    """Send `requests` (what `Target.request` made) as `load` says, and wait for all answers.

    A request that fails has the reason in its exchange. A request is sent again only if its connection had served
    another one and was closed before the first byte of the answer. Raises `ValueError` unless a schedule has one time
    for each request.
    """
    target.tls()  # reads certificates now, not while a request waits
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
    """Do what `run` does in the running loop, over connections that `connect` opens. `clock` must run as fast as the
    loop's."""
    if isinstance(load, Open) and len(load.times) != len(requests):
        raise ValueError(f"a schedule of {len(load.times)} times for {len(requests)} requests")
    client = _Client(target, requests, connect, clock)
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # it takes half a second with a million objects
    try:
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
    finally:
        if collects:
            gc.enable()
    exchanges = [client.exchanges[number] for number in range(len(requests))]
    stalls = client.stall_seconds, client.longest_stall
    return Recording(exchanges, start, end, cpu, *stalls, step, client.reusable)


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
        """Open connections for the requests that leave at once. A failure here shows again where the connection is
        needed.

        Not more: servers with a thread for each connection (llama-server) would have none left for others.
        """
        made = await asyncio.gather(*(self.new_connection() for _ in range(number)), return_exceptions=True)
        self.free = [each for each in made if isinstance(each, Connection)]

    async def new_connection(self) -> Connection:
        """Open a connection."""
        _, connection = await self.connect(lambda: Connection(self.clock, self.room))
        self.connections.append(connection)
        return connection

    async def send_in_slots(self, slots: int) -> None:
        """Send in slots, each of which sends its next request when its last has ended."""
        numbers = iter(range(len(self.requests)))

        async def slot(intended: float) -> None:
            for number in numbers:
                exchange = await self.exchange(number, intended)
                intended = exchange.finished or self.clock()

        start = self.clock()
        await asyncio.gather(*(slot(start) for _ in range(min(slots, len(self.requests)))))

    async def send_at(self, times: Sequence[float]) -> None:
        """Send each request at its time."""
        start, tasks = self.clock(), []
        for number, at in enumerate(times):
            wait = start + at - self.clock()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(self.exchange(number, start + at)))
        await asyncio.gather(*tasks)

    async def exchange(self, number: int, intended: float) -> Exchange:
        """Send one request, over a free connection or a new one."""
        exchange = self.exchanges[number] = Exchange(number, intended, taken=self.clock())
        while True:
            try:
                connection = self.take() or await self.new_connection()
            except (OSError, TimeoutError) as error:
                failure = f"no connection: {reason(error, self.target.connect_timeout)}"
                exchange.failure = NO_FILES if getattr(error, "errno", None) in FILES_OUT else failure
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
        """Return the connection that was used last, if it is open, may be reused and was not idle for long."""
        reuse = self.target.reuse and self.reusable
        while self.free:
            connection = self.free.pop()
            if connection.usable and (reuse or not connection.used) and self.clock() - connection.free_since < STALE:
                return connection
            connection.close()
        return None

    async def watch(self) -> None:
        """Measure how late the loop is, until cancelled."""
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
