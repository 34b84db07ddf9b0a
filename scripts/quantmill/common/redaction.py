"""Remove the secrets that this process knows from servers' answers and logs.

A secret is found in upper and lower case, percent-encoded, escaped as in JSON or HTML, in hexadecimal and in base64.
"""

import base64
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quantmill.common.atomic import write_atomically

MASK = "***"
LEAST = 8  # characters of a secret: shorter ones occur in ordinary words and numbers
WORD = 4  # characters of a server's token; below LEAST it is found only as a whole word
ROUNDS = 4  # of escapes within escapes
MAX_FILE = 2**16  # bytes of a file of tokens
MAX_LINE = 2**20  # bytes of a log that are searched together
# names of environment variables that hold secrets
NAMES = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY)S?$|_(KEY|PASS|PAT|AUTH|CREDENTIALS?)$")
USERINFO = re.compile(r"(?<=://)[^\s/@\"'<>]+@")
ESCAPE = re.compile(
    r"\\{1,8}(?:u([0-9a-f]{4})|x([0-9a-f]{2})|(?=/))|%(?:25){0,8}([0-9a-f]{2})|&#x([0-9a-f]{1,6});|&#([0-9]{1,7});",
    re.IGNORECASE,
)


class Secrets:
    """Secrets, and methods that mask them in texts. `own`: a server's token, which may be short."""

    def __init__(self, known: frozenset[str], own: str | None = None) -> None:
        long = {each for each in {*known, own or ""} if len(each) >= LEAST}
        self.words = [own] if own and WORD <= len(own) < LEAST else []
        forms = {form for each in long for form in _forms(each)}
        self.forms = sorted({form.lower() for form in forms}, key=len, reverse=True)
        self.raw_forms = [form.encode() for form in [*self.forms, *self.words]]
        self.digits = [each for each in [*long, *self.words] if each.isdecimal()]
        anywhere = [re.escape(form) for form in self.forms]
        short = [rf"(?-i:(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9]))" for word in self.words]
        self.pattern = re.compile("|".join([*anywhere, *short]) or r"(?!)", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Return `text` without secrets and without user names and passwords of URLs.

        If a secret was escaped, the returned text is unescaped.
        """
        if len(text) < WORD:
            return text
        found = plain = self._mask(text)
        for _ in range(ROUNDS):
            after = ESCAPE.sub(_character, plain)
            if after == plain:
                break
            plain = after
            if (masked := self._mask(plain)) != plain:
                found = plain = masked
        return found

    def value(self, value: Any) -> Any:
        """Return a JSON value without secrets in its texts, keys and numbers."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if self.digits and type(value) in (int, float) and any(each in repr(value) for each in self.digits):
            return MASK
        return value

    def may_be_in(self, raw: bytes) -> bool:
        """Return whether raw JSON may hold a secret; False is certain."""
        if b"\\" in raw or b"%" in raw or b"&#" in raw or b"://" in raw:
            return True
        lower = raw.lower()
        return any(form in lower for form in self.raw_forms) or any(word.encode() in raw for word in self.words)

    def file(self, path: Path) -> None:
        """Remove the secrets from a log. A log without secrets is not rewritten."""
        with path.open(encoding="utf-8", errors="replace") as lines:
            if all(self.text(line) == line for line in _pieces(lines)):
                return
        with (
            write_atomically(path) as partial,
            partial.open("w", encoding="utf-8") as out,
            path.open(encoding="utf-8", errors="replace") as lines,
        ):
            out.writelines(map(self.text, _pieces(lines)))

    def _mask(self, text: str) -> str:
        lower = text.lower()
        if any(form in lower for form in self.forms) or any(word in text for word in self.words):
            text = self.pattern.sub(MASK, text)
        return USERINFO.sub(f"{MASK}@", text) if "://" in text else text


def of(own: str | None = None) -> Secrets:
    """Return all secrets that this process knows, and a server's token `own`."""
    return _secrets(frozenset(_known()), own)


_secrets = lru_cache(8)(Secrets)


def is_secret(name: str) -> bool:
    """Return whether a variable or an option of that name holds a secret."""
    return bool(NAMES.search(name.upper().replace("-", "_")))


def _known() -> Iterator[str]:
    """Yield the values of secret variables, passwords in URLs, and the tokens of the Hugging Face hub."""
    for name, value in os.environ.items():
        if is_secret(name) and not _is_there(value):
            yield value.strip()
        if "://" in value and "@" in value:
            with suppress(ValueError):
                yield urlsplit(value).password or ""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    yield from _tokens(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")
    yield from _tokens(f"{home}/stored_tokens")


def _is_there(path: str) -> bool:
    """Return whether a value is an existing path, which is not a secret."""
    with suppress(OSError):
        return Path(path).exists()
    return False


@cache
def _tokens(path: str) -> tuple[str, ...]:
    """Read the tokens of a file: each line, or the part after its `=`."""
    with suppress(OSError, ValueError):
        file = Path(path).expanduser()
        if file.is_file():
            with file.open(encoding="utf-8") as lines:
                text = lines.read(MAX_FILE)
            return tuple(line.rpartition("=")[2].strip() for line in text.splitlines() if line.strip()[:1] != "[")
    return ()


def _forms(secret: str) -> Iterator[str]:
    """Yield a secret, and its hexadecimal and base64 forms."""
    raw = secret.encode("utf-8", "surrogateescape")
    yield secret
    yield raw.hex()
    for before in range(3):  # bytes encoded before it; only characters that depend on the secret alone are kept
        whole = base64.b64encode(b"\0" * before + raw).decode()
        inner = whole[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]
        yield inner
        yield inner.translate(str.maketrans("+/", "-_"))


def _character(match: re.Match[str]) -> str:
    *hexadecimal, decimal = match.groups()
    code = next((int(each, 16) for each in hexadecimal if each), int(decimal) if decimal else None)
    return "" if code is None else chr(code) if code < 0x110000 else match[0]


def _pieces(file: Any) -> Iterator[str]:
    """Yield lines in pieces of at most `MAX_LINE`; only a secret of a megabyte could be cut in two."""
    while line := file.readline(MAX_LINE):
        yield line
