"""Server-sent events: one field per line, events between empty lines (the HTML standard, 9.2). Or one JSON per line."""

import re
from collections import Counter
from collections.abc import Iterator

LINE_END = re.compile(rb"\r\n|\r|\n")


def read_events(content: bytes, complete: bool, oddities: Counter[str]) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Yield where each event begins and ends, its name, and its data. Comments are counted as `pings`.

    Args:
        complete: whether nothing more can come: then the last event needs no empty line after it.
    """
    name, data, start = b"", list[bytes](), -1
    for line, begin, after in _lines(content, 3 if content.startswith(b"\xef\xbb\xbf") else 0, complete):
        if not line:
            if data:
                yield start, after, name, b"\n".join(data)
            name, data, start = b"", [], -1
            continue
        if line.startswith(b":"):
            oddities["pings"] += 1
            continue
        start = begin if start < 0 else start
        key, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if key == b"data":
            data.append(value)
        elif key == b"event":
            name = value
        elif key == b"error":  # not in the standard, but sent by some servers
            name = key
            data.append(value)
    if data and complete:
        yield start, len(content), name, b"\n".join(data)


def read_lines(content: bytes, complete: bool, oddities: Counter[str]) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Yield the same for a stream with one JSON object per line, as ollama's."""
    at = 0
    for line in content.splitlines(keepends=True):
        if line.strip() and (complete or line.endswith(b"\n")):
            yield at, at + len(line), b"", line
        at += len(line)


def _lines(content: bytes, begin: int, complete: bool) -> Iterator[tuple[bytes, int, int]]:
    """Yield each line, where it begins, and where the next one does; an unended last one only if nothing more can
    come."""
    for end in LINE_END.finditer(content, begin):
        yield content[begin : end.start()], begin, end.end()
        begin = end.end()
    if complete and begin < len(content):
        yield content[begin:], begin, len(content)
