"""A process's children end with it, also after kill -9, while it loads and afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmill import servers
from quantmill.devices import processes

SCRIPTS = Path(servers.__file__).parents[2]
STARTS = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
STARTS += "start_new_session=True); import time; time.sleep(600)"
# a guarded process that starts another, which starts a third in a session of its own
PARENT = f"""
import os, subprocess, sys, time
from quantmill.devices import processes
from quantmill.servers.guard import Guard
guard = Guard()
child = subprocess.Popen([sys.executable, "-c", {STARTS!r}])
while len(found := processes.tree([child.pid])) < 2:
    time.sleep(0.05)
{{then}}
print(*found, flush=True)
{{last}}
"""
CLOSES = "guard.close(); sys.exit()"
FORKS = """if (forked := os.fork()) == 0:
    time.sleep(600)
guard.settle(); found = [*found, forked]"""


@pytest.fixture
def start() -> Callable[..., tuple[subprocess.Popen[str], list[int]]]:
    def begin(then: str, last: str = "time.sleep(600)") -> tuple[subprocess.Popen[str], list[int]]:
        command = [sys.executable, "-c", PARENT.format(then=then, last=last)]
        parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": SCRIPTS}, stdout=subprocess.PIPE, text=True)
        assert parent.stdout
        return parent, [int(each) for each in parent.stdout.readline().split()]

    return begin


def left(pids: list[int], seconds: float) -> list[int]:
    """Those that still run after so long at most."""
    deadline = time.monotonic() + seconds
    while (found := [pid for pid in pids if processes.began(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("then", ["guard.settle()", "time.sleep(1)"], ids=["settled", "while it loads"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_it(start: Callable, then: str, end: signal.Signals) -> None:
    parent, found = start(then)
    assert len(left(found, 0)) == 2
    parent.send_signal(end)
    assert parent.wait() == -end
    assert left(found, 20) == []


def test_a_forked_process_holds_nothing_open(start: Callable) -> None:
    """It inherits the pipe whose end is the word to kill."""
    parent, found = start(FORKS)
    parent.kill()
    parent.wait()
    assert len(found) == 3
    assert left(found, 20) == []


def test_a_process_that_ends_before_it_is_answered(start: Callable) -> None:
    says = "guard.process.stdout.close(); guard.process.stdin.write(b's'); guard.process.stdin.flush(); time.sleep(2)"
    parent, found = start(says)
    parent.kill()
    parent.wait()
    assert left(found, 20) == []


def test_the_guard_goes_with_it(start: Callable) -> None:
    parent, found = start("guard.settle(); found = [*found, guard.process.pid]")
    parent.kill()
    parent.wait()
    assert left(found, 20) == []


def test_what_may_stay_is_left_alone(start: Callable) -> None:
    parent, found = start("guard.settle()", CLOSES)
    assert parent.wait() == 0
    try:
        assert len(left(found, 1)) == 2
    finally:
        for pid in found:
            os.kill(pid, signal.SIGKILL)
