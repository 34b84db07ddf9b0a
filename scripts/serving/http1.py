"""What a client must know of HTTP/1.1 to find the end of a response, and its body. Bytes of a stranger: bounded."""

import re
from typing import NamedTuple

MAX_HEAD = 64 * 1024  # bytes
MAX_SIZE_LINE = 256  # bytes of a chunk's size and its extensions
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")  # then an extension or nothing


class Head(NamedTuple):
    """Status and framing of a response. `body` is where its body begins; `length` is None unless it is told."""

    status: int
    body: int
    length: int | None
    chunked: bool
    close: bool
    content_type: str


def read_head(data: bytes | bytearray) -> Head | None:
    """The head of a response; None while it is not whole. 100 Continue and its like are passed over.

    Raises ValueError where this is no HTTP/1.1.
    """
    start = 0
    while True:
        end = data.find(b"\r\n\r\n", start, start + MAX_HEAD)
        if end < 0:
            if len(data) - start >= MAX_HEAD or not b"HTTP/1.".startswith(data[start : start + 7]):
                raise ValueError("no head of an HTTP response")
            return None
        first, *lines = bytes(data[start:end]).split(b"\r\n")
        match = STATUS.match(first)
        if not match:
            raise ValueError("no head of an HTTP response")
        status, start = int(match[1]), end + 4
        if status >= 200:
            break
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    chunked = b"chunked" in fields.get(b"transfer-encoding", b"").lower()
    length = 0 if status in (204, 304) else None
    if length is None and not chunked and b"content-length" in fields:
        length = int(fields[b"content-length"][:15])
    old = first.startswith(b"HTTP/1.0")
    close = b"close" in fields.get(b"connection", b"close" if old else b"").lower()
    content_type = fields.get(b"content-type", b"").decode("latin-1").lower()
    return Head(status, start, length, chunked, close, content_type)


def skip_chunks(data: bytes | bytearray, at: int) -> tuple[int, bool]:
    """From where a chunk's size stands, pass over all chunks that have come.

    Returns where the next size stands, and whether the last chunk and its trailer have come. Raises ValueError where
    there is no size.
    """
    size = len(data)
    while at < size:
        end = data.find(b"\r\n", at, at + MAX_SIZE_LINE)
        if end < 0:
            if size - at >= MAX_SIZE_LINE:
                raise ValueError("no size of a chunk")
            break
        length = chunk_size(data, at, end)
        if not length:
            return at, data.find(b"\r\n\r\n", end, end + MAX_HEAD) >= 0
        at = end + length + 4
    return at, False


def chunk_size(data: bytes | bytearray, at: int, end: int) -> int:
    """Bytes of the chunk whose size stands at data[at:end]."""
    match = SIZE.match(data, at, end)
    if not match:
        raise ValueError("no size of a chunk")
    return int(match[0], 16)
