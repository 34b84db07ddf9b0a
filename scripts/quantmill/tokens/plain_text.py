"""What every text goes through before it is tokenised: a user's file, or a document of a data set."""

from pathlib import Path

from quantmill.common import plain_file

MAX_BYTES = 64 * 2**20  # of a text: 16 million tokens, of which nobody measures so many


class NotPlain(ValueError):
    """Bytes that are no text: what they are, where, and what to do; the file's name is to precede it."""


def normalise(text: str) -> str:
    """The same text without byte order marks at its beginning, and with LF for CRLF and for CR alone."""
    return text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def read(path: Path) -> str:
    """A text file, through `normalise`. Raises `NotPlain` where it is not UTF-8, holds a NUL, only white space, or more
    than `MAX_BYTES`, and `UserError` where it is no file."""
    raw = plain_file.read(path, MAX_BYTES)
    if len(raw) > MAX_BYTES:
        raise NotPlain(f"is larger than {MAX_BYTES >> 20} MiB; name a part of it")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotPlain(f"is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    if "\0" in text:
        place = raw.index(0)
        line = normalise(text[: text.index("\0")]).count("\n") + 1
        raise NotPlain(f"has a NUL at byte {place}, in line {line}; remove it, or save it as UTF-8")
    text = normalise(text)
    if not text.strip():
        raise NotPlain("is empty; put a text in it (prompts: one a line)")
    return text
