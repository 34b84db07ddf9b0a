"""Limit the memory and time of computations that untrusted files control, such as tokenizers and templates.

`call` and `supervise` start a child process, and `step` sets limits in it during one piece of work. The kernel enforces
them, because Python can interrupt neither a regular expression in Rust nor a power of two integers. The parent reports
unfinished work. Only the standard library is imported here.

The memory limit is RLIMIT_DATA, which counts writable pages: libraries map far more than they use, and CUDA reserves
terabytes. The time limit is processor time, so that a busy machine does not matter; wall-clock time limits sleepers.
"""

import json
import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from quantmill.common.program import LIBC, PR_SET_PDEATHSIG, UserError, first_line

POLL = 0.2  # seconds between two checks of a child
PATIENCE = 20  # wall-clock seconds per second of processor time
GRACE = 10  # seconds for an interrupted child to remove its files
MAX_SAID = 2**16  # bytes of a child's standard error
ALLOCATION = b"memory allocation of"  # a Rust program prints it before it aborts
HEAD = struct.Struct("dIIH")  # of the board: when patience ends, megabytes, seconds, length of the name
BOARD = 4096  # bytes


class _Board:
    """A child's current step, in shared memory that its parent reads after the child was killed."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, BOARD)

    def write(self, what: str, megabytes: int, seconds: int) -> None:
        name = what.encode(errors="replace")[: BOARD - HEAD.size]
        patience = time.monotonic() + PATIENCE * seconds
        self.memory[: HEAD.size + len(name)] = HEAD.pack(patience, megabytes, seconds, len(name)) + name

    def read(self) -> tuple[float, int, int, str]:
        """Return the end of patience, megabytes, seconds and the step's name; zeros and "" between two steps."""
        patience, megabytes, seconds, length = HEAD.unpack_from(self.memory)
        return patience, megabytes, seconds, self.memory[HEAD.size : HEAD.size + length].decode(errors="replace")


_board: _Board | None = None  # this process's, if it is such a child


@contextmanager
def step(what: str, *, megabytes: int, seconds: int) -> Iterator[None]:
    """Limit the memory that the block adds and the processor time that it takes.

    Raises `UserError`, which begins with the file's name `what`, if memory runs out or a Rust library panics. If time
    runs out, the kernel ends this process, and its parent raises the error (`call`, `supervise`).
    """
    outer = _board.memory[:] if _board else b""
    limits = {
        resource.RLIMIT_DATA: _data_bytes() + megabytes * 2**20,
        resource.RLIMIT_CPU: int(time.process_time()) + 1 + seconds,
    }
    before = {each: resource.getrlimit(each) for each in limits}
    if _board:
        _board.write(what, megabytes, seconds)
    try:
        for each, limit in limits.items():
            hard = before[each][1]
            resource.setrlimit(each, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        yield
    except MemoryError:
        raise UserError(_out_of_memory(what, megabytes)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's; it is not an Exception
            raise
        if "memory allocation" in str(error):
            raise UserError(_out_of_memory(what, megabytes)) from None
        raise UserError(f"{what}: its library fails ({first_line(error)}); download it again") from None
    finally:
        for each, old in before.items():
            resource.setrlimit(each, old)
        if _board:
            _board.memory[:] = outer


def call(work: Callable[[], Any]) -> Any:
    """Run `work` in a child process, so that a crash ends only the child; return its result, passed as JSON.

    The child's standard error is not shown. Raises `UserError` if `work` does, or if the limit of a `step` ends it.
    """
    board = _Board()
    (answers, answer), (errors, error) = os.pipe(), os.pipe()
    pid = _fork(board)
    if pid == 0:
        os.dup2(error, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        _answer(work, answer)
    os.close(answer)
    os.close(error)
    try:
        code, said, printed = _wait(pid, board, answers, errors)
    finally:
        os.close(answers)
        os.close(errors)
    if code:
        raise RuntimeError(f"a child failed:\n{printed.decode(errors='replace')}")
    found = json.loads(said)
    if "error" in found:
        raise UserError(found["error"])
    return found["value"]


def supervise() -> None:
    """Continue in a child process, while this one waits and exits with the child's status.

    Raises `UserError` in this process if the limit of a `step` ends the child.
    """
    board = _Board()
    alive, open_end = os.pipe()
    pid = _fork(board)
    if pid == 0:
        os.close(alive)
        return
    os.close(open_end)
    sys.exit(_wait(pid, board, alive)[0])


def _fork(board: _Board) -> int:
    global _board
    sys.stdout.flush()
    sys.stderr.flush()
    mine = os.getpid()
    pid = os.fork()
    if pid == 0:
        _board = board
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != mine:
            os._exit(1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return pid


def _answer(work: Callable[[], Any], pipe: int) -> NoReturn:
    """Write the result of `work`, and end this process."""
    try:
        try:
            found = {"value": work()}
        except UserError as error:
            found = {"error": str(error)}
        with os.fdopen(pipe, "w", encoding="utf-8") as file:
            json.dump(found, file)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _wait(pid: int, board: _Board, *pipes: int) -> tuple[int, bytes, bytes]:
    """Wait for a child; return its exit code, all of the first pipe, and the beginning of the last pipe.

    Raises `UserError` if a signal ended it.
    """
    said = {pipe: bytearray() for pipe in pipes}
    unread, status, late = list(pipes), None, False
    try:
        while unread:
            for pipe in select.select(unread, [], [], POLL)[0]:
                part = os.read(pipe, 2**20)
                if not part:  # closed
                    unread.remove(pipe)
                said[pipe] += part
                if pipe != pipes[0]:
                    del said[pipe][MAX_SAID:]
            if 0 < board.read()[0] < time.monotonic():
                late = True
                os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    finally:
        if status is None:
            _interrupt(pid)
    first, last = (bytes(said[pipe]) for pipe in (pipes[0], pipes[-1]))
    if os.WIFSIGNALED(status):
        raise UserError(_why_ended(os.WTERMSIG(status), late, board, last))
    return os.waitstatus_to_exitcode(status), first, last


def _interrupt(pid: int) -> None:
    """End a child whose parent was interrupted."""
    os.kill(pid, signal.SIGTERM)
    for _ in range(int(GRACE / POLL)):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(POLL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _why_ended(number: int, late: bool, board: _Board, said: bytes) -> str:
    """Return the error for a child that a signal ended."""
    _, megabytes, seconds, what = board.read()
    if not what:
        return f"the working process was ended by {signal.Signals(number).name}; run again"
    if late:
        return f"{what}: did not finish within the {PATIENCE * seconds:,} s that Quantmill allows"
    if number == signal.SIGXCPU:
        return f"{what}: ran out of the {seconds:,} s of processor time that Quantmill allows"
    if number == signal.SIGABRT and ALLOCATION in said:
        return _out_of_memory(what, megabytes)
    if number == signal.SIGKILL:
        return f"{what}: was killed; the machine's memory may have run out"
    return f"{what}: its library crashes ({signal.Signals(number).name}); download it again"


def _out_of_memory(what: str, megabytes: int) -> str:
    return f"{what}: ran out of the {megabytes:,} MB of memory that Quantmill allows"


def _data_bytes() -> int:
    """Return the bytes that count against RLIMIT_DATA now."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("VmData:")[2].split(None, 1)[0]) * 1024
