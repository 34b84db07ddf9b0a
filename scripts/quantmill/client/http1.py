"""The part of HTTP/1.1 that finds the end of a response, and its body. The bytes are not trusted: they are bounded, and
no error shows them."""

import re
from typing import NamedTuple

MAX_HEAD = 64 * 1024  # bytes of a head with what is skipped before it, and of a trailer
MAX_FIELD = 16 * 1024  # bytes of one of its lines
MAX_SIZE_LINE = 256  # bytes of a chunk's size and its extensions
STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\r\n\0]*)?")
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
LENGTH = re.compile(rb"\d{1,15}")
SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n\0]*)?")
LINE_FEED = 10
PLAIN = (b"", b"identity")


class Head(NamedTuple):
    """Status and framing of a response. `body` is where its body begins; `length` is None if unknown; `packed` says
    that the body is compressed, which was not asked for."""

    status: int
    body: int
    length: int | None
    chunked: bool
    close: bool
    content_type: str
    packed: bool = False


def read_head(data: bytes | bytearray) -> Head | None:
    """Return the head of a response; None while it is not whole. 100 Continue and the like are skipped.

    Raises ValueError where it is not HTTP/1.1, or too long.
    """
    start = 0
    while True:
        end = data.find(b"\r\n\r\n", start, MAX_HEAD)
        if end < 0:
            if len(data) >= MAX_HEAD:
                raise ValueError(f"a head of an HTTP response of more than {MAX_HEAD >> 10} KiB")
            if not b"HTTP/1.".startswith(data[start : start + 7]):
                raise ValueError("no head of an HTTP response")
            return None
        first, *lines = bytes(data[start:end]).split(b"\r\n")
        match = STATUS.fullmatch(first)
        if not match:
            raise ValueError("no head of an HTTP response")
        status, start = int(match[1]), end + 4
        if status >= 200 or status == 101:  # 101: another protocol, which was not asked for
            break
    fields = _read_fields(lines)
    codings = [each.strip() for each in fields.get(b"transfer-encoding", b"").lower().split(b",")]
    chunked = codings[-1] == b"chunked"
    length = 0 if status in (204, 304) else None
    if b"transfer-encoding" in fields:
        if not chunked or b"chunked" in codings[:-1]:
            raise ValueError("a Transfer-Encoding that does not end in chunked")
        if b"content-length" in fields:
            raise ValueError("both Content-Length and Transfer-Encoding")
    elif b"content-length" in fields:
        if not LENGTH.fullmatch(fields[b"content-length"]):
            raise ValueError("a Content-Length that is not a number")
        length = length if length is not None else int(fields[b"content-length"])
    old = first.startswith(b"HTTP/1.0")
    close = b"close" in fields.get(b"connection", b"close" if old else b"").lower()
    packed = any(each not in PLAIN for each in (*codings[:-1], fields.get(b"content-encoding", b"").lower()))
    content_type = fields.get(b"content-type", b"").decode("latin-1").lower()
    return Head(status, start, length, chunked and status not in (204, 304), close, content_type, packed)


def _read_fields(lines: list[bytes]) -> dict[bytes, bytes]:
    """Return fields by their names in lower case; a repeated one has all its values. Raises ValueError for a line that
    is not a field, and for two lengths."""
    fields: dict[bytes, bytes] = {}
    for line in lines:
        match = FIELD.fullmatch(line) if len(line) <= MAX_FIELD else None
        if not match:
            long = f" of more than {MAX_FIELD >> 10} KiB" if len(line) > MAX_FIELD else ""
            raise ValueError(f"a line of its head{long} that is not a field")
        name, value = match[1].lower(), match[2].rstrip(b" \t")
        if name in fields and not (name == b"content-length" and fields[name] == value):
            value = fields[name] + b", " + value
        fields[name] = value
    return fields


def skip_chunks(data: bytes | bytearray, at: int) -> tuple[int, int | None]:
    """Skip all chunks that have come, from a chunk's size on, which follows the end of a line.

    Returns the place of the next size, and the end of the response: None until the last chunk and its trailer have
    come. Raises ValueError where a size, or the end of a line after a chunk, is missing.
    """
    size = len(data)
    while at < size:
        if data[at - 1] != LINE_FEED:
            raise ValueError("no end of a chunk where its size says")
        end = data.find(b"\r\n", at, at + MAX_SIZE_LINE)
        if end < 0:
            if size - at >= MAX_SIZE_LINE:
                raise ValueError("no size of a chunk")
            break
        length = chunk_size(data, at, end)
        if not length:
            stop = data.find(b"\r\n\r\n", end, end + MAX_HEAD)
            if stop < 0 and size - end >= MAX_HEAD:
                raise ValueError(f"a trailer of more than {MAX_HEAD >> 10} KiB")
            return at, stop + 4 if stop >= 0 else None
        at = end + length + 4
    return at, None


def chunk_size(data: bytes | bytearray, at: int, end: int) -> int:
    """Return the bytes of the chunk whose size is data[at:end]."""
    match = SIZE.fullmatch(data, at, end)
    if not match:
        raise ValueError("no size of a chunk")
    return int(match[1], 16)
