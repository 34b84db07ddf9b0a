"""Kill the processes that a process started when it dies in any way.

Without it, vLLM's engine outlives kill -9 of the process that uses its class LLM, and keeps the GPU's memory. `Guard`
runs this file as a process; its standard input is a pipe from the guarded process, which the kernel closes.
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

# words in the pipe: all has started; nothing is to be killed. Without DONE, the end of the pipe means to kill
SETTLED, DONE = b"s", b"q"
POLL = 0.2  # seconds, while processes start


class Guard:
    """Kill the processes that this one starts, until `close`, if this one dies in any way.

    After `settle`, only descendants of the processes known by then are killed.
    """

    def __init__(self) -> None:
        command = [*program.command("servers.guard"), str(os.getpid())]
        pipe, environment = subprocess.PIPE, surroundings.of_child(command)
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, env=environment)
        assert self.process.stdin and self.process.stdout
        self.words, self.replies = self.process.stdin, self.process.stdout
        os.register_at_fork(after_in_child=self.words.close)  # a pipe ends when no process holds it

    def settle(self) -> None:
        """Stop watching for new processes; return when all present ones are known."""
        self._tell(SETTLED)
        self.replies.read(1)  # empty if it was killed

    def close(self) -> None:
        """End the guard; the started processes have ended, or may stay."""
        self._tell(DONE)
        self.process.wait()

    def _tell(self, word: bytes) -> None:
        with suppress(BrokenPipeError):  # it was killed
            self.words.write(word)
            self.words.flush()


def watch(pid: int) -> None:
    """Watch the processes that `pid` starts; kill them when the pipe ends without `DONE`."""
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
        with suppress(BrokenPipeError):  # the guarded process is gone
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
        signal.signal(name, signal.SIG_IGN)  # they are for the guarded process
    watch(int(sys.argv[1]))
