"""Tasks that run in a fresh process: one of our programs, with its own engine, on the same device.

A task and its answer are pickled into a file without a name, which only the two processes can open.
"""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from quantmill import devices
from quantmill.common.program import UserError, start_child
from quantmill.devices import cpu


@dataclass(frozen=True)
class Task:
    """The artifact, engine and device of a task. `device` is resolved: `cpu` or `cuda`."""

    artifact: Path
    engine: str
    options: dict[str, Any]
    gpus: int
    device: str


T = TypeVar("T", bound=Task)


def run_task(command: Sequence[str], task: Task) -> Any:
    """Run a task in a fresh process, and return its answer.

    `command` starts the process; a file descriptor follows it. Numbers of threads come from the task, not from the
    environment. A process that fails prints the reason, and this one exits with its status. Raises `UserError` if a
    signal ends it.
    """
    environment = {name: value for name, value in os.environ.items() if name not in cpu.THREAD_VARIABLES}
    with TemporaryFile() as file:
        pickle.dump(task, file)
        file.seek(0)
        told = file.fileno()
        with start_child([*command, told], env=environment, pass_fds=[told]) as child:
            status = child.wait()
        if status < 0:
            raise UserError(f"{task.artifact}: its process was killed by signal {-status}; was memory short?")
        if status:
            sys.exit(status)
        file.seek(0)
        return pickle.load(file)


def answer_task(work: Callable[[T], Any]) -> None:
    """Do the task that `run_task` passed to this process, on its GPUs. Raises `UserError` if they are missing."""
    with os.fdopen(int(sys.argv[1]), "r+b") as file:
        task: T = pickle.load(file)
        devices.resolve(task.device, gpus=task.gpus)
        found = work(task)
        file.seek(0)
        file.truncate()
        pickle.dump(found, file)
