"""Two people, two checkouts, one folder of artifacts: one workflow at a time, and nothing of either is spoilt."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from workflows import ROUNDS, check_artifacts, run, start, wait_for, with_interpreters

STUDY = "models: {demo: {source: demo}}\nformats: [fp16]\ndevice: cpu\n"
HELD = r"error: .*shared: a workflow of \S+ \(process \d+ on .*, in .*, since .*\) "
REPLACED = 300  # times that each of two programs publishes a folder
LOCK = """
import sys
sys.path.insert(0, "scripts")
from pathlib import Path
from quantmill.common import workflow_lock
from quantmill.common.program import run
folder = Path(sys.argv[1])
planned = workflow_lock.read(folder)
if len(sys.argv) > 2:
    print("planned", flush=True)
    sys.stdin.readline()
run(lambda: workflow_lock.hold(folder, planned))
print("held", flush=True)
sys.stdin.read()
"""
PUBLISH = f"""
import sys
sys.path.insert(0, "scripts")
from pathlib import Path
from quantmill.common.program import UserError
from quantmill.common.atomic import write_atomically
final, done = Path(sys.argv[1]), 0
while done < {REPLACED}:
    try:
        with write_atomically(final, sync=False) as folder:
            folder.mkdir()
            for name in ("first", "second", "quantmill.json"):
                (folder / name).write_text(f"{{sys.argv[2]}} {{done}}")
    except UserError as error:
        assert "another program is writing it" in str(error)
    else:
        done += 1
"""


@pytest.fixture
def roots(checkout: Callable[[], Path], tmp_path: Path, tools_python: Path) -> list[Path]:
    """Two copies of the project whose artifacts are one folder."""
    (tmp_path / "shared").mkdir()
    roots = [checkout(), checkout()]
    for root in roots:
        (root / "artifacts").symlink_to(tmp_path / "shared")
        (root / "study.yaml").write_text(with_interpreters(STUDY))
    return roots


def test_two_at_once_are_one_after_the_other(roots: list[Path], tmp_path: Path) -> None:
    lock = tmp_path / "shared/.lock"
    first = start(roots[0], "artifacts/demo/bin")
    wait_for(lambda: lock.exists() and lock.read_text())
    first.send_signal(signal.SIGSTOP)  # so that it surely works there until the other has looked
    code, told = run(roots[1], "artifacts/demo/bin")
    first.send_signal(signal.SIGCONT)
    said, _ = first.communicate()
    assert first.returncode == 0, said
    assert code == 1
    assert re.fullmatch(HELD + "is working there; wait for it to end, .*", told.splitlines()[-1])
    assert "Traceback" not in told
    assert check_artifacts(tmp_path / "shared") == {"source", "safetensors", "bin"}
    for root in roots:
        code, told_again = run(root, "artifacts/demo/bin")
        assert code == 0
        assert "Nothing to be done" in told_again


def test_studies_that_overlap_at_any_moment(roots: list[Path], tmp_path: Path) -> None:
    moments = random.Random(0)
    wanted = [["artifacts/demo/safetensors"], ["artifacts/demo/safetensors", "artifacts/demo/bin"]]
    refused = 0
    for number in range(ROUNDS):
        subprocess.run(["rm", "-rf", str(tmp_path / "shared/demo")], check=True)
        first = start(roots[0], *wanted[0])
        time.sleep(moments.uniform(0, 3) if number else 0)
        second = start(roots[1], *wanted[1])
        # both, before what was refused runs again
        ended = [(workflow.communicate()[0], workflow.returncode) for workflow in (first, second)]
        for (told, status), root, targets in zip(ended, roots, wanted, strict=True):
            if status:
                refused += 1
                assert re.match(HELD, told.splitlines()[-1]), told
                code, told = run(root, *targets)
                assert code == 0, told
        assert check_artifacts(tmp_path / "shared") == {"source", "safetensors", "bin"}
        assert all("Nothing to be done" in run(root, *targets)[1] for root, targets in zip(roots, wanted, strict=True))
    assert refused


def test_one_checkout_knows_what_the_other_made(roots: list[Path]) -> None:
    assert run(roots[0], "artifacts/demo/safetensors")[0] == 0
    study = roots[1] / "study.yaml"
    study.write_text(study.read_text().replace("source: demo", "source: {path: demo}"))
    code, told = run(roots[1], "artifacts/demo/safetensors", "--dry-run")
    assert code == 0
    assert "Params have changed" in told


def test_looking_needs_no_lock(roots: list[Path], tmp_path: Path) -> None:
    holder = hold(tmp_path / "shared")
    assert holder.stdout.readline() == "held\n"
    before = sorted(tmp_path.rglob("*"))
    assert run(roots[0], "--dry-run", "report")[0] == 0
    code, told = run(roots[0], "artifacts/demo/source")
    assert code == 1
    assert re.match(HELD, told.splitlines()[-1])
    assert sorted(tmp_path.rglob("*")) == before
    holder.communicate()


def test_environments_wait_for_another_workflow(roots: list[Path], tmp_path: Path) -> None:
    holder = hold(tmp_path / "shared")
    assert holder.stdout.readline() == "held\n"
    code, told = run(roots[0], "envs/tools")
    assert code == 1
    assert re.match(HELD, told.splitlines()[-1]), told
    assert not (roots[0] / "envs/tools").exists()
    holder.communicate()


def hold(folder: Path, *later: str) -> subprocess.Popen[str]:
    """Start a program that holds the lock until its input ends. `later`: it takes it after a line of input."""
    command = [sys.executable, "-c", LOCK, str(folder), *later]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPO, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_lock_is_free_however_its_holder_ends(tmp_path: Path, end: signal.Signals) -> None:
    first = hold(tmp_path)
    assert first.stdout.readline() == "held\n"
    os.kill(first.pid, end)
    first.communicate()
    assert hold(tmp_path).communicate()[0] == "held\n"


def test_an_outdated_plan_is_not_run(tmp_path: Path) -> None:
    late = hold(tmp_path, "later")
    assert late.stdout.readline() == "planned\n"
    assert hold(tmp_path).communicate()[0] == "held\n"
    told = late.communicate("\n")[1]
    assert re.fullmatch(r"error: .* worked there while this one was planned; start again\n", told)


def test_two_programs_that_publish_the_same_name(tmp_path: Path) -> None:
    final = tmp_path / "out"
    command = [sys.executable, "-c", PUBLISH, str(final)]
    programs = [subprocess.Popen([*command, name], cwd=REPO) for name in "ab"]
    found = set()
    while any(program.poll() is None for program in programs):
        try:
            folder = os.open(final, os.O_RDONLY)
        except FileNotFoundError:  # between two renames
            continue
        try:
            texts = {read(name, folder) for name in ("first", "second", "quantmill.json")}
        except FileNotFoundError:  # replaced since it was opened, and half-removed
            continue
        finally:
            os.close(folder)
        assert len(texts) == 1
        found |= texts
    assert [program.returncode for program in programs] == [0, 0]
    assert {text[0] for text in found} == {"a", "b"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert len({path.read_text() for path in final.iterdir()}) == 1


def read(name: str, folder: int) -> str:
    with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=folder)) as file:
        return file.read()
