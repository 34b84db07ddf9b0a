"""End what a process started when that process goes away, however it goes: vLLM's engine outlives kill -9 of whoever
uses its class LLM, and keeps a card's memory.

`Guard` runs this file as a process of its own. The standard input is a pipe from the process that is guarded, whose end
the kernel sees to.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from quantmill.common import program, surroundings
from quantmill.devices import processes

# what the pipe says: all has started; nothing is to be ended. Its end without that is the word to kill
SETTLED, DONE = b"s", b"q"
POLL = 0.2  # seconds, while processes start


class Guard:
    """What this process starts is killed when this process is gone, whatever ended it: from now on, also while it
    loads, up to `close`. Of what starts after `settle` only what those processes start."""

    def __init__(self) -> None:
        command = [*program.command("servers.guard"), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=surroundings.of_child(command),
        )
        assert self.process.stdin is not None
        os.register_at_fork(after_in_child=self.process.stdin.close)  # a pipe ends when nobody holds it

    def settle(self) -> None:
        """Everything has started: once this returns, it has seen all and looks no more."""
        self._tell(SETTLED)
        assert self.process.stdout is not None
        self.process.stdout.read(1)  # empty where somebody ended it

    def close(self) -> None:
        """What was started has ended, or may stay."""
        self._tell(DONE)
        self.process.wait()

    def _tell(self, word: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # somebody ended it
            self.process.stdin.write(word)
            self.process.stdin.flush()


def watch(pid: int) -> None:
    """Look at what a process starts, and kill it once the pipe has ended without `DONE`."""
    known: dict[int, int | None] = {}
    told = b""
    while told not in (SETTLED, DONE):
        if select.select([sys.stdin.fileno()], [], [], POLL)[0]:
            told = os.read(sys.stdin.fileno(), 1)
            if not told:
                break
        new = processes.tree([pid]) - known.keys() - {pid, os.getpid()}
        known |= {each: processes.began(each) for each in new}
    if told == SETTLED:
        with suppress(BrokenPipeError):  # who asked is gone
            os.write(sys.stdout.fileno(), SETTLED)
        told = os.read(sys.stdin.fileno(), 1)
    if told == DONE:
        return
    while left := [each for each, ticks in known.items() if ticks and processes.began(each) == ticks]:
        for each in processes.tree(left):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(POLL)


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # they are for the process that is guarded
    watch(int(sys.argv[1]))
