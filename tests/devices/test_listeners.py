"""Servers at a URL, found among real listening processes; the GPU is a stand-in, whose processes are ours."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from test_conditions import Nvml

from quantmill.devices import cuda, listeners, monitor
from quantmill.devices.host_load import Load
from quantmill.devices.listeners import Answering
from quantmill.latency import measure
from quantmill.latency.job import LatencyTask, Protocol
from quantmill.latency.worker import Measurement

pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="other systems than Linux do not tell"),
]
# it listens on an address and tells its port and its processes: itself, and those that it started
SERVER = """
import os, socket, subprocess, sys, time
address, name = sys.argv[1], sys.argv[2]
if name: open("/proc/self/comm", "w").write(name)
family = socket.AF_INET6 if ":" in address else socket.AF_INET
listener = socket.socket(family)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind((address, int(sys.argv[3]) if sys.argv[3:] else 0))
listener.listen()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(listener.getsockname()[1], os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
# a launcher that starts the one that listens and a worker, each in a group of its own
LAUNCHER = """
import os, subprocess, sys, time
router = subprocess.Popen([sys.executable, "-c", sys.argv[1], "127.0.0.1", ""], stdout=subprocess.PIPE, process_group=0)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print(router.stdout.readline().decode().strip(), os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""
Serve = Callable[..., list[int]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server in a session of its own: its port, and its processes."""
    started: list[int] = []

    def run(*words: str, program: str = SERVER, prefix: tuple[str, ...] = ()) -> list[int]:
        command = [*prefix, sys.executable, "-c", program, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process.pid)
        told = [int(word) for word in process.stdout.readline().split()]
        started.extend(told[1:])
        return told

    yield run
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6")


@pytest.mark.parametrize(
    ("listens", "asked"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("0.0.0.0", "HOST"),
        pytest.param("::1", "[::1]", marks=IPV6),
        pytest.param("::", "127.0.0.1", marks=IPV6),
        pytest.param("::", "[::]", marks=IPV6),
    ],
)
def test_a_local_server_is_known_by_every_name(serve: Serve, listens: str, asked: str) -> None:
    port, server, child = serve(listens, "")
    found = listeners.find(f"http://{asked.replace('HOST', socket.gethostname())}:{port}/v1")
    assert found == Answering("here", frozenset({server}))
    assert found.processes() == {server, child}


def test_workers_next_to_the_listener_count(serve: Serve) -> None:
    port, router, child, launcher, worker = serve(SERVER, program=LAUNCHER)
    found = listeners.find(f"http://127.0.0.1:{port}")
    assert found.pids == {launcher}
    assert found.processes() == {launcher, router, child, worker}


def test_several_listeners_on_one_port_count(serve: Serve) -> None:
    port, one, child = serve("127.0.0.1", "")
    _, other, second = serve("127.0.0.1", "", str(port))
    assert listeners.find(f"http://127.0.0.1:{port}").processes() == {one, child, other, second}


def test_a_listener_at_another_address_is_a_stranger(serve: Serve) -> None:
    port, one, _ = serve("127.0.0.1", "")
    _, other, _ = serve("127.0.0.2", "", str(port))
    _, every, _ = serve("0.0.0.0", "", str(port))
    found = [listeners.find(f"http://127.0.0.{last}:{port}").pids for last in (1, 2, 3)]
    assert found == [{one}, {other}, {every}]


@pytest.mark.parametrize("name", ["ssh", "nginx", "haproxy", "kubectl"])
def test_a_forwarder_is_not_the_server(serve: Serve, name: str) -> None:
    port, *_ = serve("127.0.0.1", name)
    words = f"{name} forwards requests to the server, so interference from other programs is unknown"
    assert listeners.find(f"http://127.0.0.1:{port}") == Answering("unknown", unknown=words)


def test_a_hidden_container_is_of_this_machine(serve: Serve) -> None:
    port, *_ = serve("127.0.0.1", "docker-proxy")
    found = listeners.find(f"http://127.0.0.1:{port}")
    assert (found.place, found.pids) == ("here", frozenset())
    assert found.unknown.startswith("docker-proxy forwards requests to the server")


def in_a_namespace(address: str) -> tuple[str, ...]:
    """Return the beginning of a command that runs in its own network, like a container."""
    words = f'ip link set lo up && ip address add {address}/32 dev lo && exec "$@"'
    return ("unshare", "--net", "sh", "-c", words, "sh")


CONTAINERS = pytest.mark.skipif(
    not (shutil.which("ip") and shutil.which("unshare"))
    or subprocess.run([*in_a_namespace("10.99.9.9"), "true"], capture_output=True).returncode != 0,
    reason="a network of its own needs root, unshare and ip",
)


@CONTAINERS
@pytest.mark.parametrize("passed_on", [True, False])
def test_a_server_in_a_visible_container_is_known(serve: Serve, passed_on: bool) -> None:
    port, server, child = serve("0.0.0.0", "", prefix=in_a_namespace("10.99.9.9"))
    url = f"http://10.99.9.9:{port}"
    if passed_on:
        words = ("-container-ip", "10.99.9.9", "-container-port", str(port))
        here, *_ = serve("127.0.0.1", "docker-proxy", "0", *words)
        url = f"http://localhost:{here}"
    found = listeners.find(url)
    assert found == Answering("here", frozenset({server}))
    assert found.processes() == {server, child}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a while")
def test_another_users_server_cannot_be_known(serve: Serve) -> None:
    port, *_ = serve("127.0.0.1", "")
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.setresuid(65534, 65534, 65534)
        os.write(writing, json.dumps(asdict(listeners.find(f"http://127.0.0.1:{port}")), default=list).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.load(pipe)
    assert found["pids"] == []
    assert found["unknown"].startswith("the server's processes are another user's")


def test_a_server_on_another_host_is_reported() -> None:
    words = "the server runs on another host, so interference from other programs is unknown"
    for host in ("192.0.2.7", "name.invalid", "[2001:db8::1]"):
        assert listeners.find(f"http://{host}:8000") == Answering("elsewhere", unknown=words)


def test_unused_ports_and_invalid_urls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert listeners.find(f"http://127.0.0.1:{port}").place == "unknown"
    for wrong in ("", "localhost", "http://x:99999", "ftp://localhost", "http://[::1", 8000, None):
        assert listeners.find(wrong) is None
    assert listeners.of_options({}) is None


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    nvml = Nvml()
    monkeypatch.setattr(cuda, "nvml_devices", lambda: (nvml, ["handle"]))
    monkeypatch.setattr(monitor, "PERIOD", 0.01)
    return nvml


def interference_of(url: str, monkeypatch: pytest.MonkeyPatch, own: set[int], load: Load | None) -> list[str]:
    """Return the interference that latency.measure reports for the server at a URL; its process is a stand-in."""
    names = dict.fromkeys(Measurement.__dataclass_fields__)

    def run_task(command: list[str], job: LatencyTask) -> Measurement:
        start = time.perf_counter()
        time.sleep(0.3)
        words = {"measured": (start, time.perf_counter()), "decode_phases": [], "own": sorted(own), "load": load}
        return Measurement(**names | words)

    monkeypatch.setattr(measure, "run_task", run_task)
    protocol = Protocol(2, repeats=1, processes=1, decode="generate", prompt_tokens=[], batch_sizes=[1])
    job = LatencyTask(Path(), "openai", {"url": url}, 1, "cuda", [1], Path(), Path(), protocol)
    found = measure.measure(job)
    assert isinstance(found, measure.Observation)
    return found.interference


def test_a_local_server_is_its_gpus_user(serve: Serve, nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    port, server, child = serve("127.0.0.1", "")
    url, own = f"http://127.0.0.1:{port}", {server, child}
    nvml.pids, nvml.used = [child], 40 * 10**9
    assert interference_of(url, monkeypatch, own, None) == []
    nvml.pids = [child, 7]
    assert interference_of(url, monkeypatch, own, None) == [
        "1 other process on the GPU before it started",
        "1 other process on the GPU meanwhile",
    ]
    nvml.pids = []  # a container that shows no processes: the memory may be the server's
    assert interference_of(url, monkeypatch, own, None) == []
    nvml.pids = [99991]  # or counts them by other numbers: one is taken for the server's
    assert interference_of(url, monkeypatch, own, None) == []


@pytest.mark.parametrize("place", ["passage", "elsewhere"])
def test_an_unknown_server_has_no_disturbance(
    serve: Serve, nvml: Nvml, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    url = "http://192.0.2.7:8000" if place == "elsewhere" else f"http://127.0.0.1:{serve('127.0.0.1', 'ssh')[0]}"
    nvml.pids, nvml.used = [5, 6], 40 * 10**9
    load = Load(others=0.4, stolen=0.0, quota_stops=0, heat_stops=0)
    assert interference_of(url, monkeypatch, set(), load) == []
    # what is known stays: the client's own processors were stopped
    assert interference_of(url, monkeypatch, set(), replace(load, quota_stops=2)) != []
