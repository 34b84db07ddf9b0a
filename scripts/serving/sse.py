"""Server-sent events: fields a line, events between empty lines (the HTML standard, 9.2). Or JSON, a line an event."""

from collections import Counter
from collections.abc import Iterator


def read_events(content: bytes, complete: bool, oddities: Counter[str]) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Where each event begins and ends, its name, and its data. Comments are counted as `pings`.

    Args:
        complete: whether nothing more can come: then an event counts that no empty line ends.
    """
    name, data, start = b"", [], None
    at = 3 if content.startswith(b"\xef\xbb\xbf") else 0
    size = len(content)
    while at < size:
        begin, end = at, _line_end(content, at)
        if end < 0:
            if not complete:
                return
            end = size
        line = content[begin:end]
        at = end + (2 if content.startswith(b"\r\n", end) else 1)
        if not line:
            if data:
                yield start, min(at, size), name, b"\n".join(data)
            name, data, start = b"", [], None
            continue
        if line.startswith(b":"):
            oddities["pings"] += 1
            continue
        start = begin if start is None else start
        key, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if key == b"data":
            data.append(value)
        elif key == b"event":
            name = value
        elif key == b"error":  # no field of the standard, but of some servers
            name = key
            data.append(value)
    if data and complete:
        yield start, size, name, b"\n".join(data)


def read_lines(content: bytes, complete: bool, oddities: Counter[str]) -> Iterator[tuple[int, int, bytes, bytes]]:
    """The same of a stream that is a JSON object a line, as ollama's."""
    at = 0
    for line in content.splitlines(keepends=True):
        if line.strip() and (complete or line.endswith(b"\n")):
            yield at, at + len(line), b"", line
        at += len(line)


def _line_end(content: bytes, at: int) -> int:
    """Where the line ends: before the next carriage return or line feed; -1 where it does not."""
    feed = content.find(b"\n", at)
    back = content.find(b"\r", at, feed if feed >= 0 else len(content))
    return back if back >= 0 else feed
