"""Processes of a tool that torch.distributed connects, each with a GPU of its own."""

import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed

from quantmill.build.quantizer import gpu_memory
from quantmill.build.quantizer.program import BuildTask
from quantmill.common import program
from quantmill.common.program import UserError, first_line, leave_at_once, start_child

PATIENCE = timedelta(hours=6)  # a process waits as long for another one, which saves the model, for example
POLL_SECONDS = 0.2


def run(name: str, task: BuildTask) -> None:
    """Run a program of ours in as many processes as the task has GPUs, to their end.

    The standard input of each is the pickled task. The log of the first goes to standard error. Raises `RuntimeError`
    with the last line of one that fails; the others are killed.
    """
    threads = max(1, torch.get_num_threads() // task.gpu.gpus)
    with TemporaryDirectory(dir=task.saved, prefix=".ranks-") as name_of_folder, ExitStack() as stack:
        folder, children = Path(name_of_folder), []
        for rank in range(task.gpu.gpus):
            given = stack.enter_context((folder / f"{rank}.task").open("w+b"))
            pickle.dump(task, given)
            given.seek(0)
            log = stack.enter_context((folder / f"{rank}.log").open("wb"))
            command = [*program.command(name), rank, folder]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            child = start_child(command, environment, stdin=given, stdout=log, stderr=log)
            children.append(stack.enter_context(child))
        while None in (ended := [child.poll() for child in children]) and not any(ended):
            time.sleep(POLL_SECONDS)
        logs = [(folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace") for rank in range(len(children))]
        sys.stderr.write(logs[0])
        for log_of_rank, status in zip(logs, ended, strict=True):
            if status:
                last = (log_of_rank.strip().splitlines() or ["it was killed; memory short?"])[-1]
                raise RuntimeError(last.removeprefix("error: "))
        task.gpu.peaks += [int(file.read_text(encoding="ascii")) for file in folder.glob("*.peak")]


def answer(work: Callable[[BuildTask], None]) -> None:
    """Do the task of `run`, connected with the other processes. Raises `UserError` for whatever fails."""
    leave_at_once()  # one that waits for the others while it ends would keep `run` waiting
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    task: BuildTask = pickle.load(sys.stdin.buffer)
    store = distributed.FileStore(str(folder / "meeting"), task.gpu.gpus)
    words = {"store": store, "rank": rank, "world_size": task.gpu.gpus, "timeout": PATIENCE}
    if task.device == "cuda":
        torch.cuda.set_device(rank)
        task.gpu.enforce()
        distributed.init_process_group("nccl", device_id=torch.device("cuda", rank), **words)
    else:
        distributed.init_process_group("gloo", **words)
    try:
        work(task)
    except Exception as error:
        raise UserError(first_line(error)) from error
    if task.device == "cuda":
        (folder / f"{rank}.peak").write_text(str(gpu_memory.peak()), encoding="ascii")
    distributed.barrier()  # none ends while another one needs it
