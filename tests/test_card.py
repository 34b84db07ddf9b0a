"""Of several GPUs, a job holds one. NVML is played by a module of this file: no GPU is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from devices import card

NVML = """
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetUUID(number): return f"GPU-{number}"
"""
HOLD = """
import os, subprocess, sys
from pathlib import Path
from devices import card
card.FOLDER = Path(sys.argv[1])
card.hold()
print(os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
child = "import os; from devices import card; card.hold(); print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
subprocess.run([sys.executable, "-c", child], check=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path):  # noqa: ANN201 - a function that starts a job
    """Start a job that holds a card until it is told to end."""
    (tmp_path / "pynvml.py").write_text(NVML)
    jobs = []

    def begin(**environment: str) -> subprocess.Popen[str]:
        env = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", card.HELD)}
        env |= {"PYTHONPATH": f"{tmp_path}:{REPO / 'scripts'}"} | environment
        command = [sys.executable, "-c", HOLD, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        jobs.append(subprocess.Popen(command, env=env, text=True, **pipes))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


def cards(job: subprocess.Popen[str]) -> tuple[str, str]:
    """What a job and a process of its own see."""
    return job.stdout.readline().strip(), job.stdout.readline().strip()


def test_jobs_take_a_card_each_and_the_third_waits(start) -> None:  # noqa: ANN001
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
    assert start(CUDA_VISIBLE_DEVICES="").stdout.readline().strip() == ""


def test_without_nvml_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card.hold()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
