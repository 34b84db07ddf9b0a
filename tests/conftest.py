"""Fixtures, markers and the order of the tests. They run in the bootstrap environment; programs that need torch or the
report's libraries are run by the interpreters of `envs/`, which `make test` builds first.

A test is marked `workflow` here if one of its fixtures copies the project, to run Snakemake there, and `unit` if it
neither does that, nor starts heavy libraries of another environment, nor builds environments. `long`, `slow` and
`timing` are written at the test. pytest-xdist runs the tests of a file in one worker, in their order, so that their
fixtures are made once.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from program_fixtures import Result  # a plugin, which is imported below

REPO = Path(__file__).parent.parent
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each started program compiles its imports
sys.dont_write_bytecode = False  # nor are assertions rewritten in each run
if "PYTEST_XDIST_WORKER" in os.environ:  # a waiting thread that spins takes the core from the other worker
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
settings.register_profile("suite", deadline=None)  # an example's time depends on the machine's load
settings.load_profile("suite")
pytest_plugins = [
    "attached_servers",
    "bundle_fixtures",
    "cut_demo",
    "llama_fixtures",
    "program_fixtures",
    "published_study",
    "run_fixtures",
]
collect_ignore = ["browser"]  # in an environment of its own: make test
AUTOGPTQ = ["autogptq-int4"] if sys.version_info[:2] == (3, 11) else []  # its environment is for Python 3.11 alone
MEMORY = 200 * 1024  # KiB
SLOW_UNTIL = float(os.environ.get("SLOW_TESTS_UNTIL", "inf"))  # seconds since 1970; .ci/run sets it
NEW_TOKENS = 16  # of the demo's latency
CALIBRATION = {"samples": 4, "sequence_length": 128}  # of the demo's quantizers
CHARACTERS = 14_000  # of a short text: the quality gate's eight windows and little more
LONG = {  # files of about ten seconds or more, which begin first
    *("test_loads.py", "test_bundle.py", "test_push.py", "test_killed.py", "test_unsteady.py", "test_download.py"),
    *("test_refused_gguf.py", "test_create_env.py", "test_fuzz.py", "test_harness.py", "test_ct2_stream.py"),
}
HEAVY = {"torch_python", "mlc_python", "llama_cpp"}  # fixtures of libraries that take seconds to import
# the program, and at its end the most memory that it held
RUN = """
import atexit, runpy, sys
status = lambda: open('/proc/self/status').read().split('VmHWM:')[1].split()[0]
atexit.register(lambda: print(status()))
sys.path.insert(0, 'scripts')
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests by their fixtures, and order those that -m leaves.

    The demo's run comes first, because other files wait for it. Then come the files that take longest (`LONG`), so that
    no worker is left alone with one. Slow tests come last: slow machines skip them.
    """
    for item in items:
        copies = "checkout" in item.fixturenames
        if copies:
            item.add_marker("workflow")
        elif not (
            HEAVY & set(item.fixturenames)
            or hasattr(item.module, "interpreter")
            or item.path.parent.name == "environments"
            or has_marker(item, "long", "slow", "timing")
        ):
            item.add_marker("unit")
    yield
    slow = {item.path for item in items if has_marker(item, "slow")}
    quick = {item.path for item in items if not has_marker(item, "slow")}
    late = {item.path for item in items if "demo" in item.fixturenames}  # so that no worker waits while it is made

    def rank(item: pytest.Item) -> tuple[bool, ...]:
        path = item.path
        return path.name != "test_workflow.py", path in slow, path not in quick, path in late, path.name not in LONG

    items.sort(key=rank)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a slow test that would begin too late."""
    if has_marker(item, "slow") and time.time() > SLOW_UNTIL:
        pytest.skip("the time for slow tests was over (SLOW_TESTS_UNTIL)")


def has_marker(item: pytest.Item, *names: str) -> bool:
    """Return whether a test has one of these markers."""
    return any(map(item.get_closest_marker, names))


def line_of_refusal(result: "subprocess.CompletedProcess[str] | Result", out: Path) -> str | None:
    """Return the last line of a failed program, which left no traceback and nothing at `out`; None if it succeeded."""
    if result.returncode == 0:
        return None
    assert "Traceback" not in result.stderr
    assert not out.exists()
    return result.stderr.splitlines()[-1]


def interpreter(env: str) -> Path:
    """Return the interpreter of an environment; skip the test if it is not built."""
    path = REPO / "envs" / env / "bin" / "python"
    if not path.exists():
        pytest.skip(f"envs/{env} is not built; `.venv/bin/snakemake envs/{env}` builds it")
    return path


@pytest.fixture(scope="session")
def torch_python() -> Path:
    """Return the interpreter of envs/torch."""
    return interpreter("torch")


@pytest.fixture(scope="session")
def tools_python() -> Path:
    """Return the interpreter of envs/tools."""
    return interpreter("tools")


@pytest.fixture(scope="session")
def call(request: pytest.FixtureRequest) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command offline and capture its output; our programs of envs/tools by `run_program`, which is quicker."""
    ours = [REPO / "envs/tools/bin/python", Path("scripts/quantmill")]

    def run(*command: object, cwd: Path = REPO, **environment: str) -> subprocess.CompletedProcess[str]:
        if [Path(str(part)) for part in command[:2]] == ours and cwd == REPO:
            return request.getfixturevalue("run_program")(*command[2:], **environment)
        env = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
        return subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Copy the project's own files (tracked, or new and not ignored) to an empty folder, as a clone would hold them."""

    def copy(target: Path | None = None) -> Path:
        target = target or tmp_path_factory.mktemp("checkout")
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
def legacy(request: pytest.FixtureRequest) -> list[str]:
    """auto-gptq's format, which `demo` builds and scores where slow tests run: its kernels take minutes on a CPU."""
    return AUTOGPTQ if any(has_marker(item, "slow") for item in request.session.items) else []


@pytest.fixture(scope="session")
def demo(
    checkout: Callable[..., Path],
    call: Callable[..., subprocess.CompletedProcess[str]],
    legacy: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Run the whole default job in a copy of the project, once for all workers.

    It has this checkout's environments, a short text, little calibration, a short latency protocol, and ct2-float32. A
    test that changes it, or runs Snakemake there, copies it first.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "demo"
    root.mkdir(exist_ok=True)
    with root.with_name("demo-is-made").open("a") as state:
        fcntl.flock(state, fcntl.LOCK_EX)
        if not os.fstat(state.fileno()).st_size:
            checkout(root)
            config = (root / "config/config.yaml").read_text().replace("ct2-float16,", "ct2-float16, ct2-float32,")
            envs = ["tools", "torch", "gptqmodel", "mlc", *(["autogptq"] if AUTOGPTQ else [])]
            pythons = json.dumps({env: str(interpreter(env)) for env in envs})
            short = f"latency: {{new_tokens: {NEW_TOKENS}, repeats: 1, processes: 1}}\n"
            short += f"texts: {{evaluation: short.txt}}\ncalibration: {json.dumps(CALIBRATION)}\n"
            config = config[: config.index("latency:")] + short + f"interpreters: {pythons}\n"
            (root / "config/config.yaml").write_text(config)
            (root / "short.txt").write_text((root / "config/evaluation.txt").read_text()[:CHARACTERS])
            scored = [f"artifacts/demo/quality/{name}.json" for name in legacy]
            result = call(REPO / ".venv/bin/snakemake", "--cores", "8", "report", *scored, cwd=root)
            assert result.returncode == 0, result.stdout + result.stderr
            state.write("yes")
    return root


@pytest.fixture
def hostile_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def refusal(tmp_path: Path, run_program: Callable, hostile_model: Path) -> Callable[[], str]:
    """Convert the hostile model; the one line that refuses it. Nothing is left, and little memory was held."""

    def run() -> str:
        before = sorted(tmp_path.iterdir())
        result = run_program("checkpoint.to_safetensors", hostile_model, tmp_path / "out", "--verify")
        assert result.returncode == 1, result
        # nothing converted, nothing half-done, nothing that a pickle made
        assert sorted(tmp_path.iterdir()) == before
        assert result.memory < MEMORY
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: {hostile_model}")
        return line

    return run
