"""Servers are started, waited for and ended, whatever they do, and nothing of them stays."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmill.client.query import get
from quantmill.client.target import Target
from quantmill.common.program import UserError
from quantmill.devices import listeners, processes
from quantmill.engines.served.started import Started
from quantmill.servers import lifecycle

SCRIPTS = Path(lifecycle.__file__).parents[2]
# a server that answers, with what is wrong with it before it begins
SERVER = """
import http.server, os, signal, subprocess, sys, time
port = int(sys.argv[1])
{wrong}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"ok")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
LEAVES = (
    f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True); print('child', child.pid)"
)


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., object]:
    def start(wrong: str = "", port: int | None = None, **options: float) -> object:
        port = port or lifecycle.free_port()
        command = [sys.executable, "-u", "-c", SERVER.format(wrong=wrong), str(port)]
        files = {"log": tmp_path / "server.log", "record": tmp_path / "server.json"}
        return lifecycle.start("demo@fake", command, port, **files, **{"patience": 20.0, "grace": 0.5} | options)

    return start


def runs(pid: int) -> bool:
    return processes.began(pid) is not None


def wait(until: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_variables_of_a_run_are_the_servers(tmp_path: Path) -> None:
    """Over those that Quantmill would set."""

    class Fake(Started):
        """The server above, which writes its variables to its log."""

        def command(
            self, artifact: Path, device: str, threads: int, port: int, options: object
        ) -> tuple[list[str], dict[str, str]]:
            told = "print('told', os.environ['A'], os.environ['B'])"
            return [sys.executable, "-u", "-c", SERVER.format(wrong=told), str(port)], {"A": "ours", "B": "ours"}

    Fake.environment = {"A": "theirs"}
    (tmp_path / "fp16").mkdir()
    (tmp_path / "fp16/config.json").write_text("{}")
    engine = Fake(tmp_path / "fp16", "cpu", 1)
    try:
        assert "told theirs ours\n" in engine.log.read_text()
    finally:
        engine.close()


def test_a_server_is_ready_and_then_gone(begin: Callable, tmp_path: Path) -> None:
    with begin() as server:
        assert get(server.target, "/health") == b"ok"
        assert 0 < server.startup_s < 20
        (pid,) = server.processes()
        assert listeners.on_port(server.port) == {pid}
        server.check()
        assert (tmp_path / "server.json").exists()
    assert not runs(pid)
    assert not (tmp_path / "server.json").exists()
    assert listeners.on_port(server.port) == set()


def test_a_server_leaves_processors_to_the_client(begin: Callable) -> None:
    every = os.sched_getaffinity(0)
    mine, theirs = lifecycle.divide_processors()
    assert len(mine) == 1
    assert mine | theirs == every
    assert not mine & theirs or len(every) == 1
    with begin(processors=theirs) as server:
        (pid,) = server.processes()
        assert os.sched_getaffinity(pid) == theirs
    assert os.sched_getaffinity(0) == every


def test_children_that_hear_nothing_are_ended_too(begin: Callable, tmp_path: Path) -> None:
    with begin(LEAVES) as server:
        child = int((tmp_path / "server.log").read_text().split()[1])
        assert child in server.processes()
    assert not runs(child)


def test_a_dying_server_leaves_no_children(begin: Callable, tmp_path: Path) -> None:
    dies = "import threading; threading.Timer(0.5, lambda: (print('RuntimeError: card lost'), os._exit(3))).start()"
    with begin(f"{LEAVES}\n{dies}") as server:
        child = int((tmp_path / "server.log").read_text().split()[1])
        wait(lambda: server.supervisor.poll() is not None)
        assert not runs(child)
        with pytest.raises(UserError, match=r"demo@fake: the server ended \(exit code 3\): RuntimeError: card lost"):
            server.check()


def test_a_server_that_cannot_start_says_why(begin: Callable) -> None:
    wrong = "raise SystemExit('starting\\nValueError: no such model\\nRuntimeError: failed; see root cause above')"
    with (
        pytest.raises(UserError, match=r"before it was ready \(exit code 1\): ValueError: no such model; its log is"),
        begin(wrong),
    ):
        pass


def test_a_server_that_is_killed_at_its_start(begin: Callable) -> None:
    with (
        pytest.raises(
            UserError, match=r"before it was ready \(killed by signal 9; memory short\?\): it printed nothing"
        ),
        begin("os.kill(os.getpid(), signal.SIGKILL)"),
    ):
        pass


def test_a_server_that_is_never_ready(begin: Callable) -> None:
    with (
        pytest.raises(UserError, match=r"not ready in 1 s \(no answer \(connection refused\)\): loading; its log"),
        begin("print('loading'); time.sleep(600)", patience=1.0),
    ):
        pass


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    files = {"log": tmp_path / "server.log", "record": tmp_path / "server.json"}
    with (
        pytest.raises(UserError, match=r"no-such-server: No such file or directory"),
        lifecycle.start("demo@fake", ["no-such-server"], lifecycle.free_port(), **files),
    ):
        pass


def test_a_port_that_is_taken(begin: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with (
            pytest.raises(UserError, match=f"demo@fake: port {port} is taken by process {os.getpid()}; end it"),
            begin(port=port),
        ):
            pass


def test_an_orphan_that_takes_the_port_is_named(begin: Callable) -> None:
    """The server dies, and another program answers on its port."""
    with begin("import threading; threading.Timer(0.5, lambda: os._exit(9)).start()") as server:
        wait(lambda: server.supervisor.poll() is not None)
        with (
            socket.create_server(("127.0.0.1", server.port)),
            pytest.raises(UserError, match=f"and port {server.port} is answered by process {os.getpid()}, which is"),
        ):
            server.check()


PROGRAM = """
import sys, time
from pathlib import Path
from quantmill.servers import lifecycle
folder, port, source = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
files = {"log": folder / "server.log", "record": folder / "server.json"}
with lifecycle.start("demo@fake", [sys.executable, "-u", "-c", source, str(port)], port, grace=0.3, **files) as server:
    print(*server.processes(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("supervisor_too", [False, True])
def test_nothing_stays_after_kill_9(begin: Callable, tmp_path: Path, supervisor_too: bool) -> None:
    """Of the program that measures: its supervisor ends the server. Of that one too: the next run says what is left."""
    port = lifecycle.free_port()
    command = [sys.executable, "-c", PROGRAM, tmp_path, str(port), SERVER.format(wrong=LEAVES)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        pids = set(map(int, program.stdout.readline().split()))
        assert len(pids) == 2
        assert all(map(runs, pids))
        if supervisor_too:
            (supervisor,) = processes.tree([program.pid]) - pids - {program.pid}
            os.kill(supervisor, signal.SIGKILL)
        program.kill()
    if not supervisor_too:
        with begin() as server:  # the next run waits for what is left of the last
            assert not any(map(runs, pids))
            server.check()
        return
    child = int((tmp_path / "server.log").read_text().split()[1])
    wait(lambda: not any(map(runs, pids - {child})))  # the server itself ends with its supervisor
    lifecycle.MARGIN, margin = 0.0, lifecycle.MARGIN
    try:
        with (
            pytest.raises(UserError, match=f"a server of an earlier run was left behind; end it: kill -9 {child}$"),
            begin(grace=0.5),
        ):
            pass
    finally:
        lifecycle.MARGIN = margin
        os.kill(child, signal.SIGKILL)


def test_a_record_that_nobody_finished_is_no_obstacle(begin: Callable, tmp_path: Path) -> None:
    for content in ("", "[1]", '{"1": 0}', '{"x": 1}'):
        (tmp_path / "server.json").write_text(content)
        with begin():
            pass


def test_a_server_that_somebody_else_runs(begin: Callable) -> None:
    with begin() as server:
        lifecycle.attach(Target(server.target.url), "/health")
    with pytest.raises(UserError, match=f"{server.target.url}: no answer .connection refused.; start the server, or"):
        lifecycle.attach(Target(server.target.url), "/health")


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("a\nb\n", "b"),
        ("INFO up\nERROR cannot bind\nINFO down\n", "ERROR cannot bind"),
        (
            "torch.OutOfMemoryError: CUDA out of memory\nRuntimeError: Engine core failed. See root cause above.\n",
            "torch.Out",
        ),
        ("\x1b[31mKeyError: 'x'\x1b[0m\n\n", "KeyError: 'x'"),
        ("x\x07y", "x\\x07y"),
        (
            "ValidationError: 1 validation error for C\nmethod\n  Input should be 'x'\n  For further information\n",
            "ValidationError: 1 validation error for C method Input should be 'x'",
        ),
    ],
)
def test_the_last_error_of_a_log(tmp_path: Path, text: str, last: str) -> None:
    (tmp_path / "log").write_text(text)
    assert lifecycle.last_error(tmp_path / "log").startswith(last)
