"""Start a server, wait until it is ready, and end all its processes; or attach to a server that the user runs."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from quantmill.client.query import Unreachable, get
from quantmill.client.target import Target
from quantmill.common import bounded_json, redaction, surroundings
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, message, printable
from quantmill.devices import cpu, gpu_lock, listeners, processes
from quantmill.servers.supervisor import __file__ as SUPERVISOR  # it is run; the import tells the workflow of it

LOCAL = "127.0.0.1"
_held: dict[int, IO[str]] = {}  # the client's processor, and its lock
POLL = 0.1  # seconds between checks of readiness
KILLED = 128 + signal.SIGKILL  # usually by the kernel, for lack of memory
GRACE = 40.0  # seconds for a server to end before it is killed
MARGIN = 10.0  # seconds beyond the server's grace
TOLD = 2.0  # seconds for the supervisor to report the server's end
TAIL = 256 * 1024  # bytes at the end of a log in which its last error is searched
EXCEPTION = re.compile(r"\b\w*(Error|Exception|Interrupt)\b: \S")
ERROR = re.compile(r"\b(error|fatal|failed|cannot|unable to)\b", re.IGNORECASE)
ADVICE = {  # by words of the error
    "status 401": "name the environment variable of its token in the option token_variable",
    "status 403": "the token in the variable that token_variable names may not be the server's",
    "certificate": "name a file with the certificate of its authority in the option authority",
    "": "start the server, or correct its url",
}
POINTER = re.compile(r"root cause|see (the )?(log|stack|trace|above)", re.IGNORECASE)


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server((LOCAL, 0)) as listener:
        return listener.getsockname()[1]


def divide_processors() -> tuple[set[int], set[int]]:
    """Divide this process's processors: one for the client, the others for the server.

    A client without a processor of its own would have random times. Both get the same one if there is only one. While
    this process lives, no other client or server of ours on this host gets the client's processor.
    """
    every = sorted(cpu.processors(), reverse=True)
    mine = next((each for each in every if each in _held or _hold(each)), every[0])
    others = {
        each for each in every if each != mine and (lock := gpu_lock.try_lock(_lock_of(each))) and not lock.close()
    }
    return {mine}, others or set(every) - {mine} or set(every)


def _lock_of(processor: int) -> Path:
    return gpu_lock.FOLDER / f"quantmill-processor-{processor}.lock"


def _hold(processor: int) -> bool:
    """Lock a processor for this process's client; return False if another process has it."""
    lock = gpu_lock.try_lock(_lock_of(processor))
    if lock:
        _held[processor] = lock
    return lock is not None


@dataclass(frozen=True)
class Server:
    """A server that we started and that is ready."""

    name: str
    target: Target
    startup_s: float
    supervisor: subprocess.Popen[bytes]
    port: int
    log: Path

    def processes(self) -> set[int]:
        """Return the server's processes."""
        return processes.tree([self.supervisor.pid]) - {self.supervisor.pid}

    def check(self) -> None:
        """Raise `UserError` if it has ended, or if another process listens on its port."""
        answering = listeners.on_port(self.port)
        with suppress(subprocess.TimeoutExpired):
            self.supervisor.wait(0 if answering else TOLD)
        ended = self.supervisor.returncode
        others = answering - self.processes()
        words = []
        if ended is not None:
            words.append(f"the server ended ({_code(ended)}): {last_error(self.log)}; its log is {self.log}")
        if others:
            words.append(f"port {self.port} is answered by process {_names(others)}, which is not the server's")
        if words:
            raise UserError(f"{self.name}: {'; and '.join(words)}")


@contextmanager
def start(
    name: str,
    command: Sequence[str],
    port: int,
    *,
    log: Path,
    record: Path,
    health: str = "/health",
    environment: Mapping[str, str] | None = None,
    processors: Iterable[int] | None = None,
    patience: float = 1800.0,
    grace: float = GRACE,
) -> Iterator[Server]:
    """Run a server while the block lasts.

    Args:
        name: of the cell, for errors.
        command: it must listen on `port` of the loopback interface.
        log: file for its output.
        record: file that names the server's processes while it runs; the next run of the cell checks it.
        health: path that returns 200 when the server is ready.
        environment: variables to add to this process's environment.
        processors: processors for the server (`divide_processors`); None for all.
        patience: seconds until it must be ready.
        grace: seconds for it to end before it is killed.

    Raises:
        UserError: if a server of an earlier run still runs, the port is taken, or the server ends or is not ready in
            time; with the last error of its log.
    """
    wait_for_last(name, record, grace + MARGIN)
    if taken := listeners.on_port(port):
        raise UserError(f"{name}: port {port} is taken by process {_names(taken)}; end it, or choose another port")
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("wb") as file:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", SUPERVISOR, str(grace), *command],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=surroundings.of_child(command) | dict(environment or {}),
            preexec_fn=None if processors is None else partial(os.sched_setaffinity, 0, set(processors)),
        )
    try:
        _write(record, supervisor.pid)
        target = Target(f"http://{LOCAL}:{port}", connect_timeout=5.0)
        _wait_until_ready(name, supervisor, target, health, log, patience)
        server = Server(name, target, time.perf_counter() - began, supervisor, port, log)
        server.check()
        _write(record, supervisor.pid)
        yield server
    finally:
        _stop(supervisor, grace)
        record.unlink(missing_ok=True)
        redaction.of().file(log)


def attach(target: Target, health: str) -> bytes:
    """Return the user's server's reply on the path `health`. Raises `UserError` with advice if there is none."""
    try:
        return get(target, health)
    except Unreachable as error:
        advice = next((help for word, help in ADVICE.items() if word in str(error)), ADVICE[""])
        raise UserError(f"{target.url}: {error}; {advice}") from None


def wait_for_last(name: str, record: Path, seconds: float = GRACE + MARGIN) -> None:
    """Wait until the supervisor of a killed run has ended its server. Raises `UserError` if it stays."""
    try:
        last = bounded_json.loads(record.read_bytes())
        began = {int(pid): int(ticks) for pid, ticks in last.items() if ticks is not None}
    except (OSError, ValueError, TypeError, AttributeError):
        return  # there was none, or its writer was killed
    deadline = time.monotonic() + seconds
    while left := {pid for pid, ticks in began.items() if processes.began(pid) == ticks}:
        if time.monotonic() > deadline:
            numbers = " ".join(map(str, sorted(left)))
            raise UserError(f"{name}: a server of an earlier run was left behind; end it: kill -9 {numbers}")
        time.sleep(POLL)


def last_error(log: Path) -> str:
    """Return the last line of a log that reports an error, or its last line."""
    with log.open("rb") as file:
        begin = max(0, log.stat().st_size - TAIL)
        file.seek(begin)
        raw = file.read(TAIL)
    text = (raw.partition(b"\n")[2] if begin else raw).decode("utf-8", errors="replace")  # not half of a secret
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    raised, errors = ([line for line in lines if kind.search(line)] for kind in (EXCEPTION, ERROR))
    telling = [line for line in raised if not POINTER.search(line)]
    others = [line for line in errors if not POINTER.search(line)]
    line = (telling or others or raised or errors or lines or ["it printed nothing"])[-1]
    line = message(lines[lines.index(line) :]) if lines else line
    return printable(redaction.of().text(line))


def _wait_until_ready(
    name: str, supervisor: subprocess.Popen[bytes], target: Target, health: str, log: Path, patience: float
) -> None:
    deadline = time.monotonic() + patience
    while True:
        if supervisor.poll() is not None:
            code = _code(supervisor.returncode) + ("; memory short?" if supervisor.returncode == KILLED else "")
            raise UserError(
                f"{name}: the server ended before it was ready ({code}): {last_error(log)}; its log is {log}"
            )
        try:
            get(target, health)
            return
        except Unreachable as error:
            reason = error
        if time.monotonic() > deadline:
            raise UserError(
                f"{name}: the server was not ready in {patience:g} s ({reason}): {last_error(log)}; its log is {log}"
            )
        time.sleep(POLL)


def _stop(supervisor: subprocess.Popen[bytes], grace: float) -> None:
    if supervisor.stdin:
        supervisor.stdin.close()
    try:
        supervisor.wait(grace + MARGIN)
    except subprocess.TimeoutExpired:
        for pid in processes.tree([supervisor.pid]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        supervisor.wait()


def _write(record: Path, supervisor: int) -> None:
    """Record the running processes, so that a later run finds those that are left."""
    write_json(record, {str(pid): processes.began(pid) for pid in processes.tree([supervisor])})


def _code(code: int) -> str:
    return f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"


def _names(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
