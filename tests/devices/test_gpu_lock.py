"""Of several GPUs, a job holds as many as it asks for. NVML is played by a module of this file: no GPU is asked for."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from quantmill.devices import gpu_lock

NVML = """
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return int(__import__("os").environ.get("CARDS", 2))
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetUUID(number): return f"GPU-{number}"
"""
HOLD = """
import os, subprocess, sys
from pathlib import Path
from quantmill.devices import gpu_lock as card
card.FOLDER = Path(sys.argv[1])
card.hold(int(sys.argv[2]))
print(os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
child = "import os, sys; from quantmill.devices import gpu_lock as lock; "
child += "lock.hold(int(sys.argv[1])); print(os.environ[lock.HELD])"
subprocess.run([sys.executable, "-c", child, os.environ.get("CHILD", sys.argv[2])], check=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path):  # noqa: ANN201 - a function that starts a job
    """Start a job that holds a card until it is told to end."""
    (tmp_path / "pynvml.py").write_text(NVML)
    jobs = []

    def begin(count: int = 1, **environment: str) -> subprocess.Popen[str]:
        env = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", gpu_lock.HELD)}
        env |= {"PYTHONPATH": f"{tmp_path}:{REPO / 'scripts'}"} | environment
        command = [sys.executable, "-c", HOLD, str(tmp_path), str(count)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        jobs.append(subprocess.Popen(command, env=env, text=True, **pipes))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


def cards(job: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the GPUs that a job and a child of it see."""
    return job.stdout.readline().strip(), job.stdout.readline().strip()


def test_each_job_takes_a_gpu_and_one_waits(start) -> None:  # noqa: ANN001
    first, second = start(), None
    assert cards(first) == ("GPU-0", "GPU-0")
    second = start()
    assert cards(second) == ("GPU-1", "GPU-1")
    third = start()
    assert third.stderr.readline() == "every GPU is held by another job (GPU-0, GPU-1); waiting for one\n"
    first.kill()  # even so its lock goes
    assert cards(third) == ("GPU-0", "GPU-0")


def test_only_what_is_visible_is_taken(start) -> None:  # noqa: ANN001
    assert cards(start(CUDA_VISIBLE_DEVICES="1")) == ("GPU-1", "GPU-1")
    assert cards(start(CUDA_VISIBLE_DEVICES="GPU-7,0")) == ("GPU-7", "GPU-7")
    for nothing in ("", "-1", "5,0", "NoDevFiles"):  # the stand-in has two cards
        assert start(CUDA_VISIBLE_DEVICES=nothing).stdout.readline().strip() == nothing
    assert cards(start(CUDA_VISIBLE_DEVICES="GPU-9,-1,0")) == ("GPU-9", "GPU-9")


def test_a_job_of_several_gpus_has_all_or_waits(start) -> None:  # noqa: ANN001
    one = start(1, CARDS="3")
    assert cards(one) == ("GPU-0", "GPU-0")
    two = start(2, CARDS="3")
    assert cards(two) == ("GPU-1,GPU-2", "GPU-1,GPU-2")
    three = start(3, CARDS="3")
    said = "fewer than 3 GPUs are free (GPU-0, GPU-1, GPU-2); waiting for 3\n"
    assert three.stderr.readline() == said
    one.kill()
    one.wait()
    four = start(1, CARDS="3")
    assert cards(four) == ("GPU-0", "GPU-0")  # a waiting job holds none
    four.kill()
    two.kill()
    assert cards(three) == ("GPU-0,GPU-1,GPU-2", "GPU-0,GPU-1,GPU-2")


def test_a_child_that_wants_fewer_sees_fewer(start) -> None:  # noqa: ANN001
    """An example is the reference, which runs at the same time as the compared artifact."""
    assert cards(start(2, CHILD="1")) == ("GPU-0,GPU-1", "GPU-0")


def test_orders_of_gpus_cause_no_deadlock(start) -> None:  # noqa: ANN001
    orders = ("0,1,2", "2,1,0", "1,2,0", "0,2,1")
    jobs = [start(2, CARDS="3", CUDA_VISIBLE_DEVICES=order) for order in orders]
    done = []
    while jobs:  # each ends once it has its cards, and so lets another one have them
        ready, _, _ = select.select([job.stdout for job in jobs], [], [], 30)
        assert ready, "no job goes on"
        job = next(job for job in jobs if job.stdout is ready[0])
        mine, its_child = cards(job)
        assert mine == its_child
        done.append(set(mine.split(",")))
        job.kill()
        job.wait()
        jobs.remove(job)
    assert all(len(held) == 2 for held in done)


def test_more_cards_than_there_are_is_one_line(start) -> None:  # noqa: ANN001
    job = start(3)
    assert job.wait() == 1
    message = "gpus is 3, but 2 are visible (GPU-0, GPU-1); lower gpus"
    assert job.stderr.read().splitlines()[-1].endswith(message)


def test_without_nvml_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu_lock.hold()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
