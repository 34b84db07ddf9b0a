"""An HTTP/1.1 connection that stamps what arrives and keeps its bytes. It parses only what shows the end of a response.

A BufferedProtocol takes 5 us per arrival, a Protocol 12, because asyncio allocates a quarter of a megabyte each time.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quantmill.client.http1 import Head, read_head, skip_chunks

LOST = "the connection was lost"
TOO_LONG = "its answer has more than"
TIMED_OUT = "not complete in"  # begins the failure of a request that was given up
MAX_ANSWER = 2**26  # bytes of one response: a server that repeats its text in each event takes 20 MB for 2,000 tokens
STEP = 2**16  # bytes that are reserved at once
MAX_KEPT = 2**31  # bytes of all responses that are kept at the same time
NO_FILES = "no connection: the client may open no more files"  # the failure of a request that was never sent
BUFFER = memoryview(bytearray(256 * 1024))  # shared by a load: what came is copied before the loop goes on


@dataclass(slots=True)
class Room:
    """The bytes of responses that all connections sharing it may still keep."""

    left: int = MAX_KEPT


@dataclass(slots=True)
class Exchange:
    """A request and all that came back. Times are seconds of the client's clock.

    Attributes:
        number: of the request in its load.
        intended: when it was to be sent: by the schedule, or when the previous request of its slot had ended.
        sent: when its bytes were written; None where no connection could be opened.
        data: all bytes of the response, head and framing included.
        stamps, ends: the time of each arrival, and where in `data` it ends.
        finished: when the response was complete, or had failed.
        failure: why there is no complete response, in a few words.
        taken: when the client began with it, before it had a connection.
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
    """A connection for one request at a time, while it is `usable`.

    It has been idle since `free_since`; `used` says whether it has had a request.
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
        self._paid = 0  # bytes that are reserved
        self._at = 0  # where in the data the next chunk's size is
        self.usable = self.used = self._more = False
        self.free_since = clock()

    async def exchange(self, exchange: Exchange, request: bytes, timeout: float) -> None:
        """Send a request and wait until its response is complete or has failed, which `exchange` then holds."""
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
            self._exchange = None  # if this wait was interrupted, it must not change any more

    def close(self) -> None:
        """Close it at once."""
        self.usable = False
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Keep the transport of the open connection."""
        self._transport, self.usable = transport, True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where asyncio puts what arrives."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Stamp and keep what arrived."""
        now = self._clock()
        exchange = self._exchange
        if exchange is None:  # it was not asked for
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

    def connection_lost(self, error: Exception | None) -> None:
        """End the response: this is its end if it has neither a length nor chunks, else its loss."""
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
        self._more = len(data) > end  # the rest would be taken for the next request's response
        return True

    def _pay(self, exchange: Exchange, size: int) -> bool:
        """Reserve room for an answer of this size and what may follow. Returns False, and keeps nothing of the answer,
        where there is none."""
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
        if not self._waiter.done():  # the caller may have been interrupted
            self._waiter.set_result(None)
