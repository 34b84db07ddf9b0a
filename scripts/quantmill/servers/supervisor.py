"""Run a server's command, and end all its processes when the measuring program dies in any way.

    python supervisor.py GRACE COMMAND...

The standard input is a pipe from the measuring program, which the kernel closes even after kill -9. Then the server's
process group gets SIGTERM, and after GRACE seconds all its descendants are killed. A server that ends by itself leaves
no processes either. Only the standard library is imported: it starts in 30 ms.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
LIBC = ctypes.CDLL(None)
POLL = 0.05  # seconds, while something is to end


def descendants(process: int) -> set[int]:
    """Return the running descendants of a process; orphans among them are adopted by this process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [process]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def end(server: subprocess.Popen[bytes], grace: float) -> None:
    """Send SIGTERM to the server's group; kill its descendants after `grace` seconds."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        _reap(server)
        if server.returncode is not None:  # its descendants have no reason to stay
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        time.sleep(POLL)
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL)
        _reap(server)


def _reap(server: subprocess.Popen[bytes]) -> None:
    server.poll()
    with suppress(ChildProcessError):
        while server.returncode is not None and os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> int:
    """Supervise the server; return its exit code as a shell reports it."""
    grace, command = float(sys.argv[1]), sys.argv[2:]
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # a terminal's Ctrl-C is for the measuring program
    wake, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)

    def prepare() -> None:  # the server does not ignore signals
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_DFL)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare, close_fds=True
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    while server.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno(), wake], [], [])
        if sys.stdin.fileno() in ready:
            break
        os.read(wake, 64)
    end(server, grace)
    code = server.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
