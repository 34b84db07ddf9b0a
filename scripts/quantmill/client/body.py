"""The body of a stored HTTP response without its framing, and which arrival brought each of its bytes."""

from bisect import bisect_right
from typing import NamedTuple

from quantmill.client.connection import Exchange
from quantmill.client.http1 import MAX_SIZE_LINE, Head, chunk_size, read_head, skip_chunks


class Body(NamedTuple):
    """A body without its framing. Content from `starts[i]` on is in the data from `places[i]` on."""

    content: bytes
    starts: list[int]
    places: list[int]
    exchange: Exchange

    def arrival(self, at: int) -> int:
        """Return the number of the arrival that brought the content's byte `at`."""
        part = bisect_right(self.starts, at) - 1
        return bisect_right(self.exchange.ends, self.places[part] + at - self.starts[part])


def read_body(exchange: Exchange, head: Head) -> Body:
    """Return the body of a response. Raises ValueError where its chunks are broken, or it is compressed."""
    if head.packed:
        raise ValueError("a compressed answer, which was not asked for")
    data, start, length = exchange.data, head.body, head.length
    if not head.chunked:
        return Body(bytes(data[start:] if length is None else data[start : start + length]), [0], [start], exchange)
    parts, starts, places, at, total = [], [0], [start], start, 0
    stop, _ = skip_chunks(data, start)
    while at < min(stop, len(data)):
        end = data.find(b"\r\n", at, at + MAX_SIZE_LINE)
        size = chunk_size(data, at, end)
        parts.append(bytes(data[end + 2 : end + 2 + size]))
        starts.append(total)
        places.append(end + 2)
        total, at = total + size, end + size + 4
    return Body(b"".join(parts), starts, places, exchange)


def whole(exchange: Exchange) -> tuple[Head, bytes]:
    """Return the head of a complete response and its body. Raises ValueError where it is broken, or compressed."""
    head = read_head(exchange.data)
    if head is None:
        raise ValueError("no head of an HTTP response")
    return head, read_body(exchange, head).content
