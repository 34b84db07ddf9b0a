"""Read and normalise texts before tokenization: a user's file, or a document of a data set."""

from pathlib import Path

from quantmill.common import plain_file

MAX_BYTES = 64 * 2**20  # of a text: about 16 million tokens


class NotPlain(ValueError):
    """Bytes that are not a text. The message names the fault, its place and a remedy; the caller adds the file."""


def normalise(text: str) -> str:
    """Return the text without leading byte order marks, and with LF for CRLF and CR."""
    return text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def read(path: Path) -> str:
    """Read and normalise a text file.

    Raises `NotPlain` if it is not UTF-8, contains a NUL, is blank or is larger than `MAX_BYTES`, and `UserError` if it
    is not a file.
    """
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
        raise NotPlain("is empty; put a text in it (prompts: one per line)")
    return text
