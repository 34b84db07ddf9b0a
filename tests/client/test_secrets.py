"""A secret that a server sends back is in no result, log or error, however it is written."""

import base64
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from attached_servers import Told, read
from raw_server import OK, answer, serve
from transcript import Exchange, Replay, listen

from quantmill.client import client, query, stream
from quantmill.client.dialects import DIALECTS
from quantmill.client.schedule import Closed
from quantmill.client.target import Target
from quantmill.common import redaction
from quantmill.common.program import UserError
from quantmill.engines.served.started import Started
from quantmill.servers import lifecycle

TOKEN = "sk-Tok3n/with+signs"
COMPLETIONS = DIALECTS["completions"]
FORMS = {
    "itself": TOKEN,
    "in capitals": TOKEN.upper(),
    "percent-encoded": quote(TOKEN, safe=""),
    "percent-encoded twice": quote(quote(TOKEN, safe=""), safe=""),
    "every character percent-encoded": "".join(f"%{ord(each):02x}" for each in TOKEN),
    "as JSON escapes": "".join(f"\\u{ord(each):04x}" for each in TOKEN),
    "as JSON escapes within JSON": "".join(f"\\\\u{ord(each):04X}" for each in TOKEN),
    "with JSON's slash": TOKEN.replace("/", "\\/"),
    "as HTML": "".join(f"&#{ord(each)};" for each in TOKEN),
    "in base64": base64.b64encode(TOKEN.encode()).decode(),
    "in base64 of a user": base64.b64encode(f"me:{TOKEN}".encode()).decode(),
    "in base64 of a header": base64.b64encode(f"Bearer {TOKEN}!".encode()).decode(),
    "in base64 for URLs": base64.urlsafe_b64encode(f"a{TOKEN}".encode()).decode().rstrip("="),
    "in hexadecimal": TOKEN.encode().hex(),
}


def leaks(text: str) -> bool:
    """Return whether a text holds a part of the token, or of one of its forms, that would reveal it."""
    parts = [form[place : place + 8].lower() for form in FORMS.values() for place in range(4, len(form) - 12)]
    return any(part in text.lower() for part in parts)


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_found_however_it_is_written(form: str) -> None:
    found = redaction.of(TOKEN).text(f"before {FORMS[form]} after")
    assert found.startswith("before ") and found.endswith(" after")
    assert "***" in found
    assert not leaks(found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [3, 7, 10_000])
def test_an_error_in_chunks_shows_no_secret(form: str, size: int) -> None:
    said = (
        json.dumps({"error": {"message": f"wrong key {TOKEN} here"}})
        .encode()
        .replace(TOKEN.encode(), FORMS[form].encode())
    )
    body = b"data: " + said + b"\n\n"
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part) for part in (body[at : at + size] for at in range(0, len(body), size))
    )
    head = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serve(answer(head + chunks + b"0\r\n\r\n")) as url:
        target = Target(url, token=TOKEN, timeout=20.0)
        (exchange,) = client.run(target, [target.request("/", {})], Closed(1)).exchanges
    reply = stream.read(exchange, COMPLETIONS, TOKEN)
    assert reply.error.startswith("wrong key ") and reply.error.endswith(" here")
    assert not leaks(reply.error)


def test_a_secret_split_over_events_is_found() -> None:
    parts = [TOKEN[at : at + 3] for at in range(0, len(TOKEN), 3)]
    choices = [{"text": part, "token_ids": [5], "finish_reason": None} for part in ["so: ", *parts, "."]]
    choices[-1]["finish_reason"] = "length"
    body = b"".join(b"data: " + json.dumps({"choices": [each]}).encode() + b"\n\n" for each in choices)
    body += b"data: [DONE]\n\n"
    data = OK + b"Content-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with serve(answer(data)) as url:
        target = Target(url, token=TOKEN, timeout=20.0)
        (exchange,) = client.run(target, [target.request("/", {})], Closed(1)).exchanges
    reply = stream.read(exchange, COMPLETIONS, TOKEN)
    assert (reply.text, reply.ok, reply.tokens) == ("so: ***.", True, len(choices))


def raw(data: bytes) -> str:
    """All that a client says of an answer."""
    with serve(answer(data)) as url:
        target = Target(url, token=TOKEN, timeout=20.0)
        with pytest.raises(query.Unreachable) as found:
            query.get(target, "/health")
        (exchange,) = client.run(target, [target.request("/", {})], Closed(1)).exchanges
    return f"{found.value} {stream.read(exchange, COMPLETIONS, TOKEN)}"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 %s\r\n\r\n",
        b"HTTP/1.1 401 %s\r\nContent-Length: 0\r\n\r\n",
        b"%s HTTP/1.1 200 OK\r\n\r\n",
        OK + b"Content-Length: %s\r\n\r\n",
        OK + b"Transfer-Encoding: %s\r\n\r\n",
        OK + b"Content-Encoding: %s\r\nContent-Length: 0\r\n\r\n",
        OK + b"%s\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n%s\r\n",
        b"HTTP/1.1 400 No\r\nContent-Length: 19\r\n\r\n%s",
        b"HTTP/1.1 302 Found\r\nLocation: http://a/%s\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 500 No\r\n\r\n{"error": {"message": "%s"}}',
        b"HTTP/1.1 500 No\r\n\r\nno JSON: %s",
    ],
)
def test_no_part_of_a_response_shows_a_secret(data: bytes) -> None:
    assert not leaks(raw(data.replace(b"%s", TOKEN.encode())))


def echo(change: Callable[[Exchange], Exchange]) -> Callable[..., Exchange]:
    replay = Replay([change(dict(each)) for each in read("sglang")["exchanges"]])
    health = replay.left[0]
    return lambda method, path, body, headers: (
        health if path == health["path"] and replay.left[:1] != [health] else replay(method, path, body, headers)
    )


def at(path: str, old: str, new: str) -> Callable[[Exchange], Exchange]:
    def change(each: Exchange) -> Exchange:
        return (
            each | {"chunks": [chunk.replace(old, new) for chunk in each["chunks"]]} if path in each["path"] else each
        )

    return change


ECHOES: dict[str, Callable[[Exchange], Exchange]] = {
    "version": at("/server_info", "0.5.23", f"0.5.23+{TOKEN}"),
    "escaped version": at("/server_info", "0.5.23", FORMS["as JSON escapes"]),
    "model": at("/v1/models", "demo", f"demo-{TOKEN}"),
    "metric": at("/metrics", "sglang:prompt_tokens_total", f"sglang:{TOKEN}"),
    "finish reason": at("/generate", '"length"', f'"{TOKEN}"'),
    "error": at("/generate", "data: {", f'data: {{"error": "no {TOKEN}", '),
    "count": at("/generate", '"prompt_tokens": 13', f'"prompt_tokens": "{TOKEN}"'),
    "no JSON": at("/generate", "data: {", f"data: {TOKEN}{{"),
}


@pytest.mark.parametrize("place", ECHOES)
def test_an_attached_servers_row_shows_no_secret(place: str, attach: Callable[..., Told]) -> None:
    with listen(echo(ECHOES[place])) as url:
        result = attach("sglang", url, {"MY_TOKEN": TOKEN}, token_variable="MY_TOKEN")
    assert result.stdout or result.stderr.startswith("error: ")
    assert not leaks(result.stdout + result.stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "MY_SECRET", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"],
)
def test_secrets_of_the_environment_are_found_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hunter2-hunter2")
    assert redaction.of().text("pw hunter2-hunter2!") == "pw ***!"
    monkeypatch.delenv(name)
    assert redaction.of().text("pw hunter2-hunter2!") == "pw hunter2-hunter2!"


def test_hub_tokens_and_passwords_of_urls_are_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("hf_fileTokenOfMine\n")
    (tmp_path / "stored_tokens").write_text("[mine]\nhf_token = hf_storedTokenOfMine\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://me:proxyPassword@proxy:3128")
    said = "a hf_fileTokenOfMine b hf_storedTokenOfMine c proxyPassword d http://other:pass@host/x"
    assert redaction.of().text(said) == "a *** b *** c *** d http://***@host/x"


def test_short_secrets_blank_out_no_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of others they are left; a server's own is found as a word of its own, unless it has fewer than four
    characters."""
    monkeypatch.setenv("MY_KEY", "token")
    monkeypatch.setenv("MY_FILE_KEY", str(tmp_path))  # a place is no secret
    assert redaction.of().text(f"token 12 in {tmp_path}") == f"token 12 in {tmp_path}"
    own = redaction.of("abcd")
    assert own.text("key abcd, abcde and Xabcd") == "key ***, abcde and Xabcd"
    assert redaction.of("abc").text("key abc") == "key abc"
    assert redaction.of("").text("as it is") == "as it is"


@pytest.mark.parametrize("text", ["100% of 3 %41", "C:\\u0041", 'a "quoted" \\n', "é 日本 \U0001f600", "https://h/a@b"])
def test_a_text_without_secrets_stays_as_it_is(text: str) -> None:
    assert redaction.of(TOKEN).text(text) == text


def test_a_number_may_be_a_secret() -> None:
    secrets = redaction.of("1234567890")
    found = secrets.value({"a": 1234567890, "b": [12345678901.5, 7, True, None], "1234567890": "x"})
    assert found == {"a": "***", "b": ["***", 7, True, None], "***": "x"}


def test_a_started_servers_messages_show_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    program = "import os; token = os.environ['HF_TOKEN']; print('with', token, flush=True); raise ValueError(token)"
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", program]
    with (
        pytest.raises(UserError, match=r"ValueError: \*\*\*; its log is ") as found,
        lifecycle.start("fp16@x", command, lifecycle.free_port(), log=log, record=tmp_path / "server.json"),
    ):
        pass
    assert not leaks(str(found.value) + log.read_text())
    assert log.read_text().startswith("with ***\n")


@pytest.mark.parametrize(
    "options", [{"hf_token": "whatever-it-is"}, {"extra": ["a", TOKEN]}, {"headers": {"Authorization": TOKEN}}]
)
def test_an_option_that_holds_a_secret_is_refused(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", TOKEN)
    with pytest.raises(UserError, match="holds a secret, and results show options") as found:
        Started.check_ours(options)
    assert not leaks(str(found.value))
    Started.check_ours({"max_num_seqs": 64, "kv_cache_dtype": "fp8", "speculative_config": {"num_tokens": 3}})


def test_the_client_itself_sends_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []

    def handle(peer: socket.socket) -> None:
        heard.append(peer.recv(65536))
        peer.sendall(OK + b"Content-Length: 2\r\n\r\nok")

    with serve(handle) as url:
        assert query.get(Target(url, token=TOKEN), "/health") == b"ok"
    assert f"Authorization: Bearer {TOKEN}\r\n".encode() in heard[0]
    assert TOKEN not in os.environ.values()
