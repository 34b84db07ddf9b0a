"""Our programs, run in forks of one process (forked_programs.py): quicker than to start each."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# not the hub's client, which reads the environment when it is imported, nor plan.*, which reads the current folder
IMPORTED = (
    "quantmill.checkpoint.to_safetensors",
    "quantmill.fetch.link",
    "quantmill.gate.quality_gate",
    *("httpx2", "jinja2", "jsonschema", "referencing", "tokenizers", "yaml"),
)
MEASURING = ("latency.measure", "loads.measure", "quality.measure", "gate.check")


@dataclass
class Result:
    """End of a program's run; `memory` is its peak."""

    returncode: int
    stdout: str
    stderr: str
    memory: int


Program = Callable[..., Result]


@contextmanager
def forks(python: Path | str, program: str, *modules: str, **variables: str) -> Iterator[Program]:
    """Run a program with arguments and variables of the environment, in forks of a process that imported `modules`
    with `variables`.

    Without `sleep` it tries again at once where it would wait. `before` is code that runs before it, in its process;
    `environment` replaces this process's.
    """
    environment = os.environ | {"PYTHONPATH": str(REPO / "scripts")} | variables
    command = [python, "-P", REPO / "tests/helpers/forked_programs.py", REPO / program, *modules]
    with subprocess.Popen(
        [*map(str, command)], cwd=REPO, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def call(
            *arguments: object,
            sleep: bool = True,
            before: str = "",
            folder: Path = REPO,
            environment: Mapping[str, str] | None = None,
            **more: str,
        ) -> Result:
            words = {"arguments": ["quantmill", *map(str, arguments)], "sleep": sleep, "before": before}
            variables = os.environ | {"HF_HUB_OFFLINE": "1"} if environment is None else environment
            words |= {"folder": str(folder), "environment": {**variables, **more}}
            print(json.dumps(words), file=server.stdin, flush=True)
            return Result(**json.loads(server.stdout.readline()))

        yield call
        server.stdin.close()


@pytest.fixture(scope="session")
def run_program(tools_python: Path) -> Iterator[Program]:
    """Run a program of envs/tools, such as `checkpoint.to_bin`."""
    with forks(tools_python, "scripts/quantmill", *IMPORTED) as program:
        yield program


@pytest.fixture(scope="session")
def run_harness() -> Iterator[Program]:
    """Run a program with the engines of tests/helpers/harness, such as `latency.measure`."""
    with forks(sys.executable, "tests/helpers/harness/run.py", *(f"quantmill.{name}" for name in MEASURING)) as program:
        yield program
