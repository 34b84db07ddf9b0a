"""One connection over HTTP/1.1 that stamps what arrives and keeps its bytes. It reads no more of them than it takes to
know where a response ends.

A BufferedProtocol takes 5 us an arrival, a Protocol 12: asyncio gives that one a new quarter of a megabyte each time.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quantmill.client.http1 import Head, read_head, skip_chunks

LOST = "the connection was lost"
TOO_LONG = "its answer has more than"
TIMED_OUT = "not complete in"  # how the failure begins of what was given up
MAX_ANSWER = 2**26  # bytes of one response: what repeats its text in each event takes 20 MB for 2,000 tokens
STEP = 2**16  # bytes that room is taken for at once
MAX_KEPT = 2**31  # bytes of all responses that are kept at one time
NO_FILES = "no connection: the client may open no more files"  # of what was never sent
BUFFER = memoryview(bytearray(256 * 1024))  # of all connections of a load: what came is copied before the loop goes on


@dataclass(slots=True)
class Room:
    """How many bytes of responses may still be kept, of all connections that share it."""

    left: int = MAX_KEPT


@dataclass(slots=True)
class Exchange:
    """A request and all that came back. Times are in seconds, of the client's clock.

    Attributes:
        number: of the request in its load.
        intended: when it was to be sent: by the schedule, or when the request before it in its slot had ended.
        sent: when its bytes were written; None where no connection could be had.
        data: all bytes of the response, head and framing included.
        stamps, ends: when each arrival came, and where in `data` it ends.
        finished: when the response was complete, or had failed.
        failure: why there is no complete response, in a few words.
        taken: when the client took it up, before a connection for it was made.
    """

    number: int
    intended: float
    sent: float | None = None
    data: bytearray = field(default_factory=bytearray)
    stamps: "array[float]" = field(default_factory=lambda: array("d"))
    ends: "array[int]" = field(default_factory=lambda: array("Q"))
    finished: float | None = None
    failure: str | None = None
    taken: float | None = None


class Connection(asyncio.BufferedProtocol):
    """A connection that takes one request at a time, while it is `usable`.

    `free_since` says since when it waits, and `used` whether it has had a request.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        room: Room | None = None,
        limit: int = MAX_ANSWER,
        buffer: memoryview = BUFFER,
    ) -> None:
        """`limit`: bytes of one response. `buffer`: another one where other threads have connections too."""
        self._clock, self._room, self._limit, self._buffer = clock, room or Room(), limit, buffer
        self._exchange: Exchange | None = None
        self._head: Head | None = None
        self._paid = 0  # bytes that room is taken for
        self._at = 0  # where in the data the next chunk's size stands
        self.usable = self.used = self._more = False
        self.free_since = clock()

    async def exchange(self, exchange: Exchange, request: bytes, timeout: float) -> None:
        """Send a request and wait until its response is complete or has failed, which `exchange` then says."""
        loop = asyncio.get_running_loop()
        self._exchange, self._head, self._waiter, self._paid = exchange, None, loop.create_future(), 0
        expiry = loop.call_later(timeout, self._end, f"{TIMED_OUT} {timeout:g} s")
        self.used = True
        exchange.sent = self._clock()
        self._transport.write(request)
        try:
            await self._waiter
        finally:
            expiry.cancel()
            self._exchange = None  # where this wait was interrupted, what comes now changes nothing in it

    def close(self) -> None:
        """Close it at once."""
        self.usable = False
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """It is open."""
        self._transport, self.usable = transport, True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where asyncio puts what arrives."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        now = self._clock()
        exchange = self._exchange
        if exchange is None:  # nobody asked
            self.close()
            return
        data = exchange.data
        exchange.stamps.append(now)
        data += self._buffer[:nbytes]
        size = len(data)
        exchange.ends.append(size)
        if size > self._paid and not self._pay(exchange, size):
            return
        try:
            complete = self._is_complete(data)
        except ValueError as error:
            self._end(f"broken HTTP: {error}")
        else:
            if complete:
                self._end(None)

    def eof_received(self) -> None:
        """The server closes; `connection_lost` follows."""

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed: the end of a response that says neither its length nor sends chunks, or its loss."""
        self.usable = False
        head = self._head
        whole = head and not head.chunked and head.length is None and error is None
        self._end(None if whole else LOST)

    def _is_complete(self, data: bytearray) -> bool:
        head = self._head
        if head is None:
            head = self._head = read_head(data)
            if head is None:
                return False
            self._at = head.body
        if head.chunked:
            self._at, end = skip_chunks(data, self._at)
        else:
            end = None if head.length is None else head.body + head.length
        if end is None or len(data) < end:
            return False
        self._more = len(data) > end  # what nobody asked for: the next response would not be the next request's
        return True

    def _pay(self, exchange: Exchange, size: int) -> bool:
        """Take room for an answer of that size and what may follow. False where there is none: then nothing is kept of
        it, since whatever it holds is no answer."""
        most = min(self._limit, size + STEP)
        self._room.left -= most - self._paid
        self._paid = most
        if size <= self._limit and self._room.left >= 0:
            return True
        words = (
            f"{self._limit:,} bytes" if size > self._limit else f"{MAX_KEPT:,} bytes together with the other answers"
        )
        self._room.left += self._paid
        exchange.data, exchange.stamps, exchange.ends = bytearray(), array("d"), array("Q")
        self._end(f"{TOO_LONG} {words}")
        return False

    def _end(self, failure: str | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.finished = self.free_since = exchange.stamps[-1] if failure is None else self._clock()
        exchange.failure = failure
        if failure is not None or self._head is None or self._head.close or self._more:
            self.close()
        if not self._waiter.done():  # whoever waits may have been interrupted
            self._waiter.set_result(None)
