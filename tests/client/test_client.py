"""The client over real sockets. Tests that hold its times against the server's run alone (`timing`)."""

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO
from fake_model import VOCAB, Model
from raw_server import OK, answer, serve

from quantmill.client import client, event_loop, query, stream
from quantmill.client.dialects import DIALECTS
from quantmill.client.schedule import Closed, Open, Poisson, burst
from quantmill.client.target import Target
from quantmill.metrics import serving

FAKE = REPO / "tests/helpers/fake_server.py"
COMPLETIONS = DIALECTS["completions"]
LENGTH = OK + b"Content-Length: 2\r\n\r\nok"


@pytest.fixture
def fake() -> Iterator[Callable[..., Target]]:
    """Start fake servers, with what their command line takes."""
    started = []

    def start(*options: object) -> Target:
        command = [sys.executable, FAKE, *map(str, options)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return Target(f"http://127.0.0.1:{started[-1].stdout.readline().strip()}", timeout=60.0)

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def script() -> Iterator[Callable[..., str]]:
    """Start a server that passes each connection to a function, and return its URL."""
    with ExitStack() as servers:
        yield lambda *words: servers.enter_context(serve(*words))


def prompt(place: int, length: int = 40) -> list[int]:
    return np.random.default_rng(place).integers(2, VOCAB, length).tolist()


def requests(target: Target, number: int, new: int = 20, length: int = 40) -> list[bytes]:
    bodies = [COMPLETIONS.body("fake", prompt(place, length), new, True) for place in range(number)]
    return [target.request(COMPLETIONS.path, body) for body in bodies]


def failures(target: Target, number: int = 2, load: object = None) -> list[str | None]:
    recording = client.run(target, [target.request("/", {})] * number, load or Closed(1))
    return [exchange.failure for exchange in recording.exchanges]


@pytest.mark.parametrize("load", [Closed(8), burst(30), Poisson.draw(200.0, 30, seed=1).load])
def test_every_request_has_its_own_answer(fake: Callable, load: object) -> None:
    target = fake("--times", 0.002, 0, 0.0005, 0.0001)
    recording = client.run(target, requests(target, 30), load)
    replies = [stream.read(exchange, COMPLETIONS) for exchange in recording.exchanges]
    assert all(reply.ok for reply in replies)
    assert [reply.ids for reply in replies] == [tuple(Model().decode(prompt(place), 20)) for place in range(30)]
    assert all(each.sent >= each.intended for each in recording.exchanges)
    assert recording.cpu_seconds > 0


def test_ten_thousand_requests(fake: Callable) -> None:
    target = fake("--times", 0, 0, 0, 0, "--slots", 64)
    recording = client.run(target, requests(target, 100, new=1, length=2) * 100, Closed(64))
    assert len(recording.exchanges) == 10_000
    assert {exchange.failure for exchange in recording.exchanges} == {None}
    truth = json.loads(query.get(target, "/truth"))
    assert len(truth) == 10_000


def test_a_server_that_is_not_there_fails_every_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    target = Target(f"http://127.0.0.1:{port}")
    assert failures(target) == ["no connection: connection refused"] * 2
    assert failures(target, 2, Open((0.0, 0.01))) == ["no connection: connection refused"] * 2
    with pytest.raises(query.Unreachable, match=r"no answer \(connection refused\)"):
        query.get(target, "/health")


def test_a_server_that_says_nothing_is_given_up(script: Callable) -> None:
    url = script(lambda connection: connection.recv(1) and threading.Event().wait(5))
    target = Target(url, timeout=0.2)
    recording = client.run(target, [target.request("/", {})] * 2, Closed(2))
    assert [each.failure for each in recording.exchanges] == ["not complete in 0.2 s"] * 2
    lines = [stream.timeline(stream.read(each, COMPLETIONS)) for each in recording.exchanges]
    assert {each.outcome for each in lines} == {"unfinished"}
    assert recording.seconds < 3


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (LENGTH, None),
        (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", None),
        (OK + b"\r\nuntil the connection ends", None),
        (OK + b"Content-Length: 9\r\n\r\nok", "the connection was lost"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "the connection was lost"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nso\r\n", "broken HTTP: no size of a chunk"),
        (b"SSH-2.0-OpenSSH\r\n", "broken HTTP: no head of an HTTP response"),
        (b"", "the connection was lost"),
    ],
)
def test_what_a_server_does_to_a_connection(script: Callable, data: bytes, failure: str | None) -> None:
    """It answers once and closes, as servers may: the next request takes another connection."""
    assert failures(Target(script(answer(data))), 3) == [failure] * 3


def test_a_closed_connection_is_not_reused(script: Callable) -> None:
    """Servers close what waits; a request that was sent there would be lost."""
    made = []

    def handle(connection: socket.socket) -> None:
        made.append(connection)
        connection.settimeout(0.05)
        while connection.recv(65536):
            connection.sendall(LENGTH)

    target = Target(script(handle))
    assert failures(target, 3, Open((0.0, 0.02, 0.2))) == [None] * 3
    assert len(made) == 2  # the third request has a new one


def test_silent_closing_is_noticed_once(script: Callable) -> None:
    """llama-server does so after each stream. A request that was lost was not read, and is sent again."""
    read = []

    def handle(connection: socket.socket) -> None:
        read.append(connection.recv(65536))
        connection.sendall(LENGTH)

    target = Target(script(handle))
    recording = client.run(target, [target.request("/", {"number": number}) for number in range(20)], Closed(2))
    assert [each.failure for each in recording.exchanges] == [None] * 20
    assert not recording.reusable
    assert len(read) == len(set(read)) == 20
    alone = client.run(replace(target, reuse=False), [target.request("/", {})] * 3, Closed(1))
    assert alone.reusable


def test_a_server_that_dies_is_not_asked_twice(script: Callable) -> None:
    """Only a connection that another request has used may be lost without harm."""
    read = []

    def handle(connection: socket.socket) -> None:
        read.append(connection.recv(65536))
        connection.sendall(OK)

    target = Target(script(handle))
    assert failures(target, 2) == ["the connection was lost"] * 2
    assert len(read) == 2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", path.with_suffix(".crt")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed; it makes the certificate")
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


def test_a_tls_server_is_verified_and_given_its_token(
    script: Callable, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, make = [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **words: read.append(words["cafile"]) or make(**words))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    heard = []

    def handle(connection: socket.socket) -> None:
        while data := connection.recv(65536):
            heard.append(data)
            connection.sendall(LENGTH)

    url = script(handle, context).replace("http:", "https:")
    target = Target(f"{url}/v9/", token="sk-secret", authority=certificate.with_suffix(".crt"))
    assert failures(target, 4, Closed(2)) == [None] * 4
    assert query.get(target, "/health") == b"ok"
    assert read == [certificate.with_suffix(".crt")]  # once, and not for each of its connections
    assert all(b"Authorization: Bearer sk-secret\r\n" in data for data in heard)
    assert heard[0].startswith(b"POST /v9/ HTTP/1.1\r\n")
    assert heard[-1].startswith(b"GET /v9/health HTTP/1.1\r\n")
    assert "sk-secret" not in repr(target)
    stranger = Target(target.url, token="sk-secret")
    assert failures(stranger) == ["no connection: self-signed certificate"] * 2
    with pytest.raises(query.Unreachable, match=r"no answer \(self-signed certificate\)"):
        query.get(stranger, "/health")


def test_timers_of_the_loop_work_beside_sockets() -> None:
    async def both() -> float:
        loop = asyncio.get_running_loop()
        reader, writer = os.pipe()
        ready = loop.create_future()
        loop.add_reader(reader, lambda: ready.set_result(None) if not ready.done() else None)
        loop.call_later(0.001, os.write, writer, b"x")
        await ready
        start = loop.time()
        await asyncio.sleep(0.0105)
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)
        return loop.time() - start

    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        assert 0.0105 <= runner.run(both()) < 1


@pytest.mark.timing
def test_timers_are_exact() -> None:
    async def lags() -> list[float]:
        loop = asyncio.get_running_loop()
        found = []
        for number in range(100):
            wait = 0.001 + number * 0.000037
            start = loop.time()
            await asyncio.sleep(wait)
            found.append(loop.time() - start - wait)
        return found

    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        assert np.median(runner.run(lags())) < 0.0003  # asyncio's own: 0.0007


@pytest.mark.timing
@pytest.mark.parametrize("load", [Closed(4), Poisson.draw(3.0, 24, seed=2).load])
def test_times_are_those_of_the_server(fake: Callable, load: object) -> None:
    """TTFT, TPOT, e2e and tokens a second within 1% of what the server did.

    From when a request was sent: a server does not know when it was to be, and the client opens a connection first.
    """
    for _ in range(4):  # a stall of this machine is no fault of the client
        target = fake("--times", 0.5, 0.0025, 0.028, 0.0005, "--slots", 4)
        recording = client.run(target, requests(target, 24, new=11), load)
        timelines = [stream.timeline(stream.read(exchange, COMPLETIONS)) for exchange in recording.exchanges]
        truth = sorted(json.loads(query.get(target, "/truth")), key=lambda job: job["arrival"])
        mine = sorted(timelines, key=lambda each: each.sent)
        span = serving.window(mine, 4 if isinstance(load, Closed) else None)
        written = [time for job in truth for time in job["written"]]
        figures = {
            "ttft": (
                np.median([each.ttft_sent for each in mine]),
                np.median([job["written"][0] - job["arrival"] for job in truth]),
            ),
            "tpot": (
                np.median([each.tpot for each in mine]),
                np.median([(job["written"][-1] - job["written"][0]) / 10 for job in truth]),
            ),
            "e2e": (
                np.median([each.end - each.sent for each in mine]),
                np.median([job["written"][-1] - job["arrival"] for job in truth]),
            ),
            "tokens": (
                serving.tokens_between(mine, np.array([span.start, span.end]))[0],
                sum(span.start < time <= span.end for time in written),
            ),
        }
        off = {name: pair for name, pair in figures.items() if pair[0] != pytest.approx(pair[1], rel=0.01)}
        if not off:
            break
    assert off == {}
