"""Fixtures. The tests run in the bootstrap environment; what needs torch or the report's libraries is run by the
interpreters of `envs/`, which `make test` builds first."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

REPO = Path(__file__).parent.parent
settings.register_profile("suite", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("suite")
collect_ignore = ["browser"]  # in an environment of its own: make test
AUTOGPTQ = ["autogptq-int4"] if sys.version_info[:2] == (3, 11) else []  # its environment is for Python 3.11 alone
MEMORY = 200 * 1024  # KiB
# the program, and at its end the most memory that it held
RUN = """
import atexit, runpy, sys
status = lambda: open('/proc/self/status').read().split('VmHWM:')[1].split()[0]
atexit.register(lambda: print(status()))
sys.path.insert(0, 'scripts')
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def interpreter(env: str) -> Path:
    """The interpreter of an environment."""
    path = REPO / "envs" / env / "bin" / "python"
    if not path.exists():
        pytest.skip(f"envs/{env} is not built; `make test` builds it")
    return path


@pytest.fixture(scope="session")
def torch_python() -> Path:
    """The interpreter of envs/torch."""
    return interpreter("torch")


@pytest.fixture(scope="session")
def tools_python() -> Path:
    """The interpreter of envs/tools."""
    return interpreter("tools")


@pytest.fixture(scope="session")
def call() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command offline and capture its output."""

    def run(*command: object, cwd: Path = REPO, **environment: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
        return subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Copy the project's own files (tracked, or new and not ignored) to an empty folder, as a clone would hold them."""

    def copy() -> Path:
        target = tmp_path_factory.mktemp("checkout")
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=REPO,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listing.stdout.split("\0")):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, target / name)
        return target

    return copy


@pytest.fixture(scope="session")
def demo(checkout: Callable[[], Path], call: Callable[..., subprocess.CompletedProcess[str]]) -> Path:
    """The whole default job, environments included, run once in a fresh copy of the project; with ct2-float32 too, and
    with autogptq-int4 built and scored (on a CPU its latency alone would take minutes)."""
    root = checkout()
    config = (root / "config/config.yaml").read_text()
    (root / "config/config.yaml").write_text(config.replace("ct2-float16,", "ct2-float16, ct2-float32,"))
    scored = [f"artifacts/demo/quality/{name}.json" for name in AUTOGPTQ]
    result = call(REPO / ".venv/bin/snakemake", "--cores", "8", "report", *scored, cwd=root)
    assert result.returncode == 0, result.stdout + result.stderr
    return root


@pytest.fixture
def hostile_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def refusal(tmp_path: Path, tools_python: Path, hostile_model: Path) -> Callable[[], str]:
    def run() -> str:
        before = sorted(tmp_path.iterdir())
        program = "scripts/bin_to_safetensors.py"
        command = [tools_python, "-c", RUN, program, hostile_model, tmp_path / "out", "--verify"]
        result = subprocess.run([*map(str, command)], cwd=REPO, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1, result.stdout + result.stderr
        # nothing converted, nothing half-done, nothing that a pickle made
        assert sorted(tmp_path.iterdir()) == before
        assert int(result.stdout) < MEMORY
        lines = result.stderr.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"error: {hostile_model}"), lines
        return lines[0]

    return run
