"""Where a server of somebody else answers."""

from urllib.parse import urlsplit


def wrong_url(url: str) -> str | None:
    """Why a URL names no server, in one line that shows no secret; None where it does."""
    shown = url.rpartition("@")[2].partition("?")[0]
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets, or a port that is none
        return f"{shown!r} is no URL of a server; write http://HOST:PORT"
    if not whole or parts.username is not None or parts.query or parts.fragment or not url.isprintable():
        return f"{shown!r} is no URL of a server; write http://HOST:PORT, and name the token apart from it"
    return None
