"""Our programs, run in forks of one process (forked_programs.py): quicker than to start each."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# the hub's client itself reads the environment when it is imported
IMPORTED = (
    "quantmill.checkpoint.to_safetensors",
    "quantmill.fetch.link",
    "quantmill.gate.quality_gate",
    "httpx2",
    "yaml",
)


@dataclass
class Result:
    """What a run ended with."""

    returncode: int
    stdout: str
    stderr: str
    memory: int


Program = Callable[..., Result]


@pytest.fixture(scope="session")
def run_program(tools_python: Path) -> Iterator[Program]:
    """Run a program of envs/tools, such as `checkpoint.to_bin`, with arguments and variables of the environment.

    Without `sleep` it tries again at once where it would wait.
    """
    environment = os.environ | {"PYTHONPATH": str(REPO / "scripts")}
    command = [tools_python, "-P", REPO / "tests/helpers/forked_programs.py", *IMPORTED]
    with subprocess.Popen(
        [*map(str, command)], cwd=REPO, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def call(*arguments: object, sleep: bool = True, **more: str) -> Result:
            environment = os.environ | {"HF_HUB_OFFLINE": "1"} | more
            words = {"arguments": ["quantmill", *map(str, arguments)], "environment": environment, "sleep": sleep}
            print(json.dumps(words), file=server.stdin, flush=True)
            return Result(**json.loads(server.stdout.readline()))

        yield call
        server.stdin.close()
