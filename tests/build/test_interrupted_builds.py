"""Builds that are killed or interrupted while they work: no child goes on alone, and the next run mends all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPO, interpreter
from workflows import check_whole, wait_for

from quantmill.common import manifest

SECONDS = 120  # that a busy machine may take to start or end a process
# a child that says that it works, and does so until it is ended
CHILD = f"""#!{sys.executable}
import os, pathlib, time
path = pathlib.Path({{pid!r}})
path.with_name("writing").write_text(str(os.getpid()))
path.with_name("writing").rename(path)
time.sleep(600)
"""
SCRIPTS = f"import sys; sys.path.insert(0, {str(REPO / 'scripts')!r})\n"
MLC_LLM = SCRIPTS + "from quantmill.mlc import mlc_llm_tool\nmlc_llm_tool.version(sys.argv[1])"
LATENCY = (
    SCRIPTS
    + """
from quantmill.devices.fresh_process import run_task
from quantmill.latency import worker as process
run_task([sys.argv[1], *process.COMMAND[1:]], process.LatencyTask(*[0] * 9))
"""
)
ENDS = {
    signal.SIGTERM: "error: interrupted; nothing was written\n",
    signal.SIGINT: "error: interrupted; nothing was written\n",
    signal.SIGKILL: "",
}


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Child:
    """A program that works for minutes, where an interpreter is wanted; once it works, `pid` holds its process."""

    program: Path
    file: Path

    def pid(self) -> int:
        wait_for(self.file.exists)
        return int(self.file.read_text())


@pytest.fixture
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    folder = tmp_path_factory.mktemp("child")
    made = Child(folder / "python", folder / "pid")
    made.program.write_text(CHILD.format(pid=str(made.file)))
    made.program.chmod(0o755)
    yield made
    if made.file.exists() and is_alive(made.pid()):
        os.kill(made.pid(), signal.SIGKILL)


def start(command: Sequence[object]) -> subprocess.Popen[str]:
    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it runs in the background

    options = {"cwd": REPO, "stderr": subprocess.PIPE, "text": True, "preexec_fn": listen}
    return subprocess.Popen([str(part) for part in command], **options)


@dataclass(frozen=True)
class Build:
    """A build whose gate runs a child in place of an interpreter, and the same without its gate."""

    gated: list[object]
    plain: list[object]
    out: Path


@pytest.fixture(params=["gate.expected", "gate.check"])
def build(
    request: pytest.FixtureRequest, demo_safetensors: Path, child: Child, tools_python: Path, tmp_path: Path
) -> Build:
    out = tmp_path / "out"
    options: list[object] = []
    program = "build.fp16"  # whose own weights are the source's: gate.check is the first child
    if request.param == "gate.expected":
        library = demo_safetensors.with_name("library.so")
        library.write_bytes(b"no library; the gate would say so")
        options = ["--library", library, "--device", "cpu", "--parameters", '{"quantization": "q4f16_1"}']
        program = "build.mlc"
    plain = [tools_python, REPO / "scripts/quantmill", program, demo_safetensors, out, *options]
    gate = ["--gate-reference", "reference.json", "--gate-evaluation", "text.json"]
    gate += ["--gate-python", child.program, "--engine-python", child.program]
    gate += ["--layout", "hf", "--engine", "transformers"]
    return Build([*plain, *gate], plain, out)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def check_alone(folder: Path) -> None:
    """Return an artifact's files are those of its manifest, and nothing lies beside it."""
    check_whole(folder)
    assert entries(folder.parent) == {folder.name}


@pytest.mark.parametrize("end", ENDS)
def test_no_child_of_the_gate_outlives_the_program(build: Build, child: Child, end: signal.Signals) -> None:
    program = start(build.gated)
    pid = child.pid()
    assert {".out.gate", ".out.partial"} <= entries(build.out.parent)
    program.send_signal(end)
    assert program.communicate(timeout=SECONDS)[1] == ENDS[end]
    wait_for(lambda: not is_alive(pid))
    assert not build.out.exists()
    if end == signal.SIGKILL:  # it could not clean up; the next run, which has a gate too, does
        child.file.unlink()
        program = start(build.gated)
        os.kill(child.pid(), signal.SIGKILL)
        program.communicate(timeout=SECONDS)
    assert entries(build.out.parent) == set()
    subprocess.run(list(map(str, build.plain)), check=True)
    check_alone(build.out)


def test_a_gates_child_that_is_killed_is_one_line(build: Build, child: Child) -> None:
    program = start(build.gated)
    os.kill(child.pid(), signal.SIGKILL)
    line = f"error: {build.out}: the quality gate was killed by signal 9; memory short?\n"
    assert program.communicate(timeout=SECONDS)[1] == line
    assert program.returncode == 1
    assert entries(build.out.parent) == set()


@pytest.mark.parametrize("program", [LATENCY, MLC_LLM], ids=["latency", "MLC-LLM"])
def test_no_other_child_outlives_its_program(program: str, child: Child, torch_python: Path) -> None:
    parent = start([torch_python, "-c", program, child.program])
    pid = child.pid()
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(pid))


@dataclass(frozen=True)
class Killed:
    """The files beside an artifact when its quantizer was killed, and the SHA-256 of those that the next run built,
    and of those that an undisturbed run builds."""

    during: set[str]
    rebuilt: dict[str, str]
    expected: dict[str, str]


PARAMETERS = {
    "build.gptq": {"bits": 4, "group_size": "auto", "sym": True, "desc_act": False, "damp_percent": 0.05},
    "build.awq": {"tool": "auto", "w_bit": 4, "q_group_size": "auto", "zero_point": True, "version": "GEMM"},
}


@pytest.fixture(scope="module", params=PARAMETERS)
def killed_build(request: pytest.FixtureRequest, one_layer: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Build undisturbed with two threads, then kill a build while it quantizes, then build again with one thread."""
    log_path = one_layer / "log"
    folder = tmp_path_factory.mktemp("quantized")
    texts = [f"--{name}={one_layer / name}.json" for name in ("calibration", "evaluation")]
    command = [interpreter("gptqmodel"), REPO / "scripts/quantmill", request.param, one_layer / "fp16", folder / "out"]
    command += [*texts, "--parameters", json.dumps(PARAMETERS[request.param])]
    command = [*map(str, command), "--samples", "2", "--sequence-length", "64", "--device", "cpu"]

    def finish(threads: int) -> dict[str, str]:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with log_path.open("w") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True, env=environment)
        check_alone(folder / "out")
        return {path.name: manifest.sha256(path) for path in (folder / "out").iterdir() if path.name != manifest.NAME}

    expected = finish(2)
    shutil.rmtree(folder / "out")
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(lambda: list(folder.glob(".out.resume-*")) or "AWQ:" in log_path.read_text())  # it works
        process.kill()
        assert process.wait() == -signal.SIGKILL
    during = entries(folder)
    return Killed(during, finish(1), expected)


@pytest.mark.slow
def test_the_next_run_mends_a_killed_quantizer(killed_build: Killed) -> None:
    assert "out" not in killed_build.during
    assert {".out.partial", ".out.work"} <= killed_build.during
    assert killed_build.rebuilt == killed_build.expected  # and nothing lay beside it: check_alone
