"""Run our programs in forks of one process, which has imported their libraries; each run is as if started alone.

    python tests/helpers/forked_programs.py PROGRAM MODULE...

The process imports the modules. PROGRAM is scripts/quantmill, or a file that does the same. The process reads a request
a line, as JSON, and answers each with a line of JSON: `returncode`, `stdout`, `stderr`, and `memory`, the most that the
run held, in KiB. A request may name code that runs `before` the program.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

SECONDS = 600  # of a run, which then ends with SIGALRM


def serve() -> None:
    """Answer requests until the input ends."""
    _, program, *modules = sys.argv
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as memory:
            files = (out, err, memory)
            before = memory_now("VmRSS")
            if not (child := os.fork()):
                run(program, json.loads(line), files, before - memory_now("VmRSS"))
            _, status = os.waitpid(child, 0)
            texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in files]
            found = {"stdout": texts[0], "stderr": texts[1], "memory": int(texts[2] or 0)}
            print(json.dumps(found | {"returncode": os.waitstatus_to_exitcode(status)}), flush=True)


def memory_now(name: str) -> int:
    """Return a line of this process's status, in KiB."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def run(program: str, request: dict[str, Any], files: tuple[IO[bytes], ...], shared: int) -> None:
    """Run a program in this process, a fork, and end it. `shared`: KiB of the parent's that do not count in a fork."""
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files[:2], 1):
        os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["arguments"]
    os.chdir(request["folder"])
    if not request["sleep"]:
        time.sleep = lambda seconds: None
    status: Any = 0
    try:
        exec(request["before"], {})  # noqa: S102  (the tests' own)
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(files[2].fileno(), str(memory_now("VmHWM") + shared).encode())
    os._exit(status)


if __name__ == "__main__":
    serve()
