"""Client and fake server in one process on simulated time: what takes minutes takes none, and times are exact."""

import asyncio
import selectors
from typing import Any

from fake_server import Server, Session

from quantmill.client import client
from quantmill.client.connection import Connection
from quantmill.client.schedule import Load


class _Idle(selectors.SelectSelector):
    """Nothing ever arrives; time passes."""

    loop: "Loop"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left to happen")
        self.loop.now += timeout
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time goes to the next timer as soon as nothing else is to do."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Idle()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class Transport:
    """The client's end of a connection to a fake server."""

    def __init__(self, loop: Loop, server: Server, protocol: Connection) -> None:
        self.loop, self.protocol, self.closed = loop, protocol, False
        self.session = Session(server, self._deliver, self._lose)

    def write(self, data: bytes) -> None:
        self.loop.call_soon(self.session.feed, bytes(data))

    def abort(self) -> None:
        self.closed = True

    def _deliver(self, data: bytes) -> None:
        self.loop.call_soon(self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        if not self.closed:
            self.protocol.get_buffer(-1)[: len(data)] = data
            self.protocol.buffer_updated(len(data))

    def _lose(self) -> None:
        self.loop.call_soon(lambda: self.closed or self.protocol.connection_lost(None))


def send(
    loop: Loop, server: Server, requests: list[bytes], load: Load, delay: float = 0.0, **options: Any
) -> client.Recording:
    """Run a load on a fake server in simulated time. A connection takes `delay`; options are those of `client.send`."""

    async def connect(factory: Any) -> tuple[Transport, Connection]:
        await asyncio.sleep(delay)
        protocol = factory()
        transport = Transport(loop, server, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    clocks = {"clock": loop.time, "calendar": loop.time} | options
    target = client.Target("http://fake")
    return loop.run_until_complete(client.send(target, requests, load, connect, **clocks))
