"""Start a program of Quantmill, and end it with one line if it fails."""

import argparse
import atexit
import ctypes
import difflib
import errno
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quantmill.common import surroundings

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_LINE = 2000  # characters of an error
PR_SET_PDEATHSIG = 1  # of prctl(2)
LIBC = ctypes.CDLL(None)  # looked up before a fork
PACKAGE = Path(__file__).resolve().parents[1]


class UserError(Exception):
    """An error that the user can correct: one line that says what is wrong, where, and what to do."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, with the lines that it needs; or the error's type."""
    return message([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])


def message(lines: Sequence[str]) -> str:
    """Return the first line, with the next one after a colon, and two after pydantic's count of errors."""
    if " validation error" in lines[0]:
        return " ".join(line for line in lines[:3] if not line.startswith("For further information"))
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def printable(text: str) -> str:
    """Return one line that is safe for a terminal: control characters of untrusted text are shown escaped."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:MAX_LINE])


def suggestion(word: str, known: Collection[str], most: int = 200) -> str:
    """`; did you mean 'x'?` where a known word is close, else `; known: …`, unless those are more than `most`."""
    words = [str(each) for each in known]
    if close := difflib.get_close_matches(str(word), words, 1):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(words)) or 'none'}" if len(words) <= most else ""


def parser(doc: str) -> argparse.ArgumentParser:
    """Return an argument parser whose `--help` is the program's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def command(name: str, python: str | Path | None = None) -> list[str]:
    """Return the command of one of our programs, such as `latency.worker`, without its arguments."""
    return [str(python or sys.executable), str(PACKAGE), name]


_hasty = False


def leave_at_once() -> None:
    """Exit with os._exit() after main().

    Some libraries abort while the interpreter shuts down, which would turn a finished job into a failed one.
    """
    global _hasty
    _hasty = True


def run(main: Callable[[], None], error_status: int = 1) -> None:
    """Call `main`; end with one line instead of a traceback after a `UserError` or an interrupt.

    SIGTERM (from schedulers) and SIGHUP (from a closed terminal) are interrupts like Ctrl-C: the program removes
    unfinished files before it ends. A bug's traceback stands above the line, because reports and other programs quote
    the last line.
    """
    status: Any = None
    try:
        _call(main)
    except SystemExit as ended:
        status = ended.code
        if not _hasty and error_status == 1:
            raise
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = error_status
    if _hasty:
        atexit._run_exitfuncs()  # temporary files, and libraries' own handlers
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status or 0)
    if status is not None:
        sys.exit(status)


def _call(main: Callable[[], None]) -> None:
    """Call `main`; raise SystemExit with the line of an error."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # else it is ignored, like SIGHUP after nohup
            signal.signal(number, signal.default_int_handler)
    os.environ["PYTHONSAFEPATH"] = "1"  # for processes that libraries start
    try:
        main()
    except UserError as error:
        if error.__cause__:
            traceback.print_exception(error.__cause__)
        sys.exit(f"error: {printable(str(error))}")
    except EOFError as error:
        sys.exit(f"error: {printable(str(error))}; is it still being written? run again")
    except OSError as error:
        if error.errno in FULL:
            sys.exit(f"error: {error.strerror}, and nothing was written; free some space there and run again")
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        sys.exit(f"error: {printable(named)}")
    except MemoryError:
        sys.exit("error: memory ran out, and nothing was written; let fewer jobs run at once, or use a larger machine")
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"error: a bug in this program: {printable(f'{type(error).__name__}: {first_line(error)}')}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; nothing was written")
    finally:
        with suppress(OSError, ValueError):  # the error's line follows what libraries printed, in a log of both
            sys.stdout.flush()


@contextmanager
def start_child(
    command: Sequence[Any], env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen]:
    """Run a program while the block lasts, in the environment of `surroundings.of_child`.

    The kernel kills it when this process dies.
    """
    mine = os.getpid()

    def end_with_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != mine:  # the parent died before prctl
            os._exit(1)

    options |= {"env": surroundings.of_child(command, env), "preexec_fn": end_with_parent}
    with subprocess.Popen([str(part) for part in command], **options) as process:
        try:
            yield process
        finally:
            process.kill()  # after an interrupt, for example


def run_child(
    command: Sequence[Any],
    *,
    stdin: str | None = None,
    stdout: int = subprocess.DEVNULL,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `start_child` does; return its exit code and standard error.

    Args:
        stdin: text for its standard input; None: that of this program.
        stdout: as in subprocess.Popen.
        timeout: seconds until it is killed and `subprocess.TimeoutExpired` is raised.
    """
    if stdin is not None:
        options["stdin"] = subprocess.PIPE
    with start_child(command, stdout=stdout, stderr=subprocess.PIPE, text=True, **options) as process:
        printed, said = process.communicate(stdin, timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, printed, said)


def run_compiler(command: Sequence[Any], environment: Mapping[str, str]) -> int:
    """Run a program that starts others, such as cmake, to its end; return its exit code.

    Its output goes to standard error. An interrupt of this program kills the whole process group, so that no compiler
    goes on in a folder that the next compilation uses.
    """
    with start_child(command, env=environment, stdout=sys.stderr, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
