"""The URL of a server that its user runs."""

from urllib.parse import urlsplit


def wrong_url(url: str) -> str | None:
    """Return why a URL does not name a server, in one line without secrets; None where it does."""
    shown = url.rpartition("@")[2].partition("?")[0]
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets, or a wrong port
        return f"{shown!r} is not the URL of a server; write http://HOST:PORT"
    if not whole or parts.username is not None or parts.query or parts.fragment or not url.isprintable():
        return f"{shown!r} is not the URL of a server; write http://HOST:PORT, and give the token separately"
    return None
