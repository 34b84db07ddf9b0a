"""Answers are bounded in bytes and in time, and a client that waits for one ends when it is told to."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from load_study import SERVING
from raw_server import OK, answer, forever, serve

from quantmill.client import client, connection, query, sse, stream
from quantmill.client.body import whole
from quantmill.client.dialects import DIALECTS
from quantmill.client.schedule import Closed, burst
from quantmill.client.target import Target

CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
COMPLETIONS = DIALECTS["completions"]


def fails(handle: Callable[[socket.socket], None], seconds: float = 20.0, limit: int = 2**20) -> tuple[str, str]:
    """Return why an answer is refused: to a question outside loads, and in a load."""
    with serve(handle) as url:
        target = Target(url, timeout=seconds, connect_timeout=seconds)
        with pytest.raises(query.Unreachable) as found:
            query.get(target, "/health", limit)
        (exchange,) = client.run(target, [target.request("/", {})], Closed(1)).exchanges
    reply = stream.read(exchange, COMPLETIONS)
    assert not reply.ok
    return str(found.value), reply.failure or reply.error or "no end"


HEADS = {
    "an endless head": (forever(OK, b"X-Filler: " + b"a" * 1000 + b"\r\n"), "a head of an HTTP response of more than"),
    "a long line": (answer(OK + b"X: " + b"a" * 20_000 + b"\r\n\r\n"), "a line of its head of more than 16 KiB"),
    "an endless 100 Continue": (forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "a head of an HTTP response of more"),
    "another protocol": (answer(b"HTTP/1.1 099 No\r\n\r\n"), "no head of an HTTP response"),
    "a folded line": (answer(OK + b"X: a\r\n b\r\n\r\n"), "a line of its head that is not a field"),
    "a negative length": (answer(OK + b"Content-Length: -2\r\n\r\nok"), "a Content-Length that is not a number"),
    "a signed length": (answer(OK + b"Content-Length: +2\r\n\r\nok"), "a Content-Length that is not a number"),
    "a length for Python": (answer(OK + b"Content-Length: 0_2\r\n\r\nok"), "a Content-Length that is not a number"),
    "a secret length": (answer(OK + b"Content-Length: sk-secret-7\r\n\r\nok"), "a Content-Length that is not a number"),
    "two lengths": (
        answer(OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok"),
        "a Content-Length that is not a number",
    ),
    "length and chunks": (
        answer(OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        "both Content-Length and Transfer-Encoding",
    ),
    "chunks within": (
        answer(OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
        "a Transfer-Encoding that does not end in chunked",
    ),
    "a compressed answer": (
        answer(OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok"),
        "a compressed answer, which was not asked for",
    ),
    "compressed chunks": (
        answer(OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
        "a compressed answer, which was not asked for",
    ),
    "a long extension": (answer(CHUNKED + b"2;" + b"x" * 300 + b"\r\nok\r\n0\r\n\r\n"), "no size of a chunk"),
    "a negative size": (answer(CHUNKED + b"-2\r\nok\r\n0\r\n\r\n"), "no size of a chunk"),
    "a size for Python": (answer(CHUNKED + b"0_2\r\nok\r\n0\r\n\r\n"), "no size of a chunk"),
    "a size that is not true": (answer(CHUNKED + b"1\r\nok\r\n0\r\n\r\n"), "no end of a chunk where its size says"),
    "an endless trailer": (forever(CHUNKED + b"0\r\n", b"X: y\r\n"), "a trailer of more than 64 KiB"),
}


@pytest.mark.parametrize("fault", HEADS)
def test_wrong_framing_is_refused_by_name(fault: str) -> None:
    handle, words = HEADS[fault]
    asked, loaded = fails(handle)
    assert asked.startswith(f"no answer (broken HTTP: {words}")
    assert loaded.startswith(f"broken HTTP: {words}")
    assert "sk-" not in asked + loaded


def test_an_answer_that_is_cut_is_none() -> None:
    for data in (
        OK + b"Content-Length: 9\r\n\r\nok",
        CHUNKED + b"2\r\nok\r\n",
        CHUNKED + b"ffffffff\r\nok",
        b"HTTP/1.",
    ):
        assert fails(answer(data)) == ("no answer (the connection was lost)", "the connection was lost")


@pytest.mark.parametrize(
    "begin", [OK + b"\r\n", OK + b"Content-Length: 999999999999\r\n\r\n", CHUNKED + b"ffffffff\r\n"]
)
def test_an_endless_answer_is_given_up_and_not_kept(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.Connection.__init__, "__defaults__", (None, 2**20, connection.BUFFER))
    asked, loaded = fails(forever(begin, b"x" * 65536))
    assert asked == "/health was answered with more than 1,048,576 bytes"
    assert loaded == "its answer has more than 1,048,576 bytes"


def test_all_answers_of_a_load_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.Room.__init__, "__defaults__", (2**20,))
    with serve(forever(OK + b"\r\n", b"x" * 4096)) as url:
        target = Target(url, timeout=20.0)
        found = client.run(target, [target.request("/", {})] * 4, burst(4)).exchanges
    assert any("together with the other answers" in (each.failure or "") for each in found)
    assert sum(len(each.data) for each in found) <= 2**20


@pytest.mark.parametrize("begin", [b"", OK, OK + b"\r\n", CHUNKED])
def test_a_slow_answer_ends_at_the_timeout(begin: bytes) -> None:
    """Each byte comes well before the last one's patience is over."""
    again = {b"": b"H", OK: b"X: y\r\n", CHUNKED: b"1\r\n \r\n"}.get(begin, b" ")
    asked, loaded = fails(forever(begin, again, 0.05), seconds=0.6)
    # what drips before a head is no HTTP at its second byte
    if begin:
        assert (asked, loaded) == ("no answer (none in 0.6 s)", "not complete in 0.6 s")
    else:
        assert "broken HTTP" in asked and "broken HTTP" in loaded


def test_a_redirection_is_not_followed() -> None:
    heard = []

    def handle(peer: socket.socket) -> None:
        heard.append(peer.recv(65536))
        peer.sendall(b"HTTP/1.1 307 Elsewhere\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n")

    with serve(handle) as url, pytest.raises(query.Unreachable, match="status 307: it sends its users elsewhere"):
        query.get(Target(url, token="sk-secret-7"), "/health")
    assert len(heard) == 1


def test_bytes_behind_an_answer_belong_to_no_other_request() -> None:
    """A server that sends the next answer in advance would be taken for a quick one."""

    def handle(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(OK + b"Content-Length: 2\r\n\r\nok" + OK + b"Content-Length: 4\r\n\r\nfake")

    with serve(handle) as url:
        target = Target(url, timeout=5.0)
        found = client.run(target, [target.request("/", {})] * 2, Closed(1)).exchanges
    assert [whole(each)[1] for each in found] == [b"ok", b"ok"]


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n"])
def test_line_ends_are_read_in_linear_time(end: bytes) -> None:
    """Eight times the lines take about eight times as long; 64 times where each looks for a line's end to the end."""

    def seconds(lines: int) -> float:
        content = (b"data: {}" + end + end) * lines
        times = []
        for _ in range(5):
            begin = time.process_time()
            assert sum(1 for _ in sse.read_events(content, True, Counter())) == lines
            times.append(time.process_time() - begin)
        return min(times)

    few = seconds(4_000)
    assert seconds(32_000) < 24 * few


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
def test_events_with_other_line_ends_are_the_same(end: str) -> None:
    content = f"event: a{end}data: 1{end}data: 2{end}{end}: ping{end}data: 3{end}{end}data: 4".encode()
    found = [(name, data) for _, _, name, data in sse.read_events(content, True, Counter())]
    assert found == [(b"a", b"1\n2"), (b"", b"3"), (b"", b"4")]


def test_deep_and_crowded_json_is_an_error() -> None:
    for body in (
        b"[" * 200_000,
        b'{"choices": [' + b"1," * 900_000 + b"1]}",
        b'{"choices": [{"text": "a", "text": "b"}]}',
    ):
        data = OK + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        with serve(answer(data)) as url:
            target = Target(url, timeout=20.0)
            (exchange,) = client.run(target, [target.request("/", {})], Closed(1)).exchanges
        assert stream.read(exchange, COMPLETIONS).error.startswith("an answer that cannot be read: ")


PRELUDE = """
import sys; sys.path.insert(0, {scripts!r})
from quantmill.common.program import run
from quantmill.client import client, query, together
from quantmill.client.schedule import Closed, burst
target = client.Target({url!r}, timeout=600.0, connect_timeout=600.0)
bodies = [target.request("/", {{}})] * 4
ask = lambda number: query.ask(target, "/", {{}})
def main():
    print("begun", flush=True)
    {call}
run(main)
"""
CALLS = {
    "asking": "ask(0)",
    "asking in threads": "list(together.each(ask, range(4), 4))",
    "sending in slots": "client.run(target, bodies, Closed(4))",
    "sending a burst": "client.run(target, bodies, burst(4))",
}
STATES: dict[str, Callable[[socket.socket], None]] = {
    "no answer": lambda peer: threading.Event().wait(60) and None,
    "half a head": lambda peer: forever(OK, b"", 60)(peer),
    "a stream that drips": forever(CHUNKED, b"7\r\ndata: 1\r\n", 0.02),
    "a flood": forever(CHUNKED, b"400\r\n" + b" " * 1024 + b"\r\n", 0.0005),
}


def end(call: str, url: str, seconds: float = 1.0) -> tuple[int, str]:
    """Start a client, tell it to end after a while, and what it then says."""
    program = PRELUDE.format(scripts=str(REPO / "scripts"), url=url, call=call)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        time.sleep(seconds)
        process.terminate()
        try:
            _, said = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, said


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", STATES)
def test_sigterm_ends_a_client_in_every_state(state: str, call: str) -> None:
    with serve(STATES[state]) as url:
        assert end(CALLS[call], url) == (1, "error: interrupted; nothing was written\n")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_sigterm_ends_a_client_that_connects(scheme: str, call: str) -> None:
    """Nobody accepts: the queue of one place is full. Or nobody answers the handshake of TLS."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = []
    if scheme == "http":
        for _ in range(3):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(listener.getsockname())
    try:
        found = end(CALLS[call], f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
        assert found == (1, "error: interrupted; nothing was written\n")
    finally:
        for each in (*waiting, listener):
            each.close()


def test_sigterm_ends_a_load_of_a_hanging_server(tmp_path: Path) -> None:
    """loads.measure as the workflow runs it: its child is the client, and goes with it."""
    artifact = tmp_path / "fp16"
    artifact.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (artifact / name).write_bytes((REPO / "demo" / name).read_bytes())
    (artifact / "quantmill.json").write_text('{"source": {}}')
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_text(json.dumps({"ids": [2 + n % 900 for n in range(4000)], "context": 512, "bos_id": None}))
    asked = threading.Event()

    def handle(peer: socket.socket) -> None:
        while data := peer.recv(65536):
            if data.startswith(b"GET /v1/models"):
                body = b'{"data": [{"id": "demo"}]}'
                peer.sendall(OK + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            elif data.startswith(b"GET"):
                peer.sendall(OK + b"Content-Length: 2\r\n\r\n{}")
            else:
                asked.set()
                threading.Event().wait(60)

    with serve(handle) as url:
        command = [
            REPO / "envs/tools/bin/python",
            REPO / "scripts/quantmill",
            "loads.measure",
            artifact,
            tmp_path / "out.json",
        ]
        command += ["--engine", "sglang", "--options", json.dumps({"url": url}), "--device", "cpu"]
        command += ["--loads", json.dumps(SERVING | {"concurrency": [1]}), "--evaluation", evaluation]
        process = subprocess.Popen(
            list(map(str, command)), stderr=subprocess.PIPE, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        )
        try:
            while not asked.wait(0.1):
                assert process.poll() is None, process.stderr.read()
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert said.splitlines()[-1] == "error: interrupted; nothing was written"
    assert process.returncode == 1
    assert not (tmp_path / "out.json").exists()
