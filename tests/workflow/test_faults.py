"""Faults of disks, clocks, processes and networks under the real workflow: what is there is whole, a rerun mends all.

docs/RELIABILITY.md says what was tried how often, and how FAULT_ROUNDS makes these longer.
"""

import base64
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from workflows import ROUNDS, SNAKEMAKE, check_artifacts, check_whole, run, start, wait_for, with_interpreters

from quantmill.common import manifest

TOKENS = "artifacts/demo/tokens/evaluation.json"
TARGETS = ["artifacts/demo/bin", TOKENS]  # with what they are made from, nothing that wants torch
MADE = {"source", "safetensors", "bin"}
FULL = "error: No space left on device, and nothing was written; free some space there and run again\n"
MESSAGE_SECONDS = 0.001  # that a network file system's messages take, each way
LATE = f"""#!{sys.executable}
import os, subprocess, sys, threading, time
server = subprocess.Popen([{{server!r}}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def pump(source, target):
    while data := os.read(source, 2**20):
        time.sleep({MESSAGE_SECONDS})
        while data:
            data = data[os.write(target, data):]
    os.close(target)
threading.Thread(target=pump, args=(0, server.stdin.fileno()), daemon=True).start()
pump(server.stdout.fileno(), 1)
"""


def prepare(root: Path) -> Path:
    """Write a study of one format, with the environments of this checkout."""
    (root / "study.yaml").write_text(with_interpreters("models: {demo: {source: demo}}\nformats: [fp16]\n"))
    return root


@pytest.fixture
def root(checkout: Callable[[], Path], tools_python: Path) -> Path:
    return prepare(checkout())


@pytest.fixture(scope="module")
def undisturbed(checkout: Callable[[], Path], tools_python: Path) -> dict[str, str]:
    """SHA-256 of each file that a run without a fault makes."""
    root = prepare(checkout())
    code, told = run(root, *TARGETS)
    assert code == 0, told
    return hashes(root)


def hashes(root: Path) -> dict[str, str]:
    """Of the files of every artifact, but for the manifests, which say how long each took."""
    files = (path for path in (root / "artifacts/demo").glob("*/*") if path.is_file() and path.name[0] != ".")
    return {
        str(path.relative_to(root)): manifest.sha256(path)
        for path in files
        if path.name != "quantmill.json" and path.parent.name in MADE
    }


def check_next_run(root: Path, undisturbed: dict[str, str]) -> None:
    """One more run makes what an undisturbed one makes."""
    code, told = run(root, *TARGETS)
    assert code == 0, told
    assert check_artifacts(root / "artifacts") == MADE
    assert hashes(root) == undisturbed


@contextmanager
def mount(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a file system in memory, or skip the test."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here (root can): {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(root: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """Of some size below what the artifacts take, so that it is full in one job or another."""
    sizes = random.Random(0)
    for number in range(ROUNDS):
        with mount(tmp_path / f"disk-{number}", "-o", f"size={sizes.randrange(2**20, 34 * 2**20)}") as disk:
            (root / "artifacts").unlink(missing_ok=True)
            (root / "artifacts").symlink_to(disk)
            # one job after the other: Snakemake's own records of another one lie on this disk too
            code, told = run(root, "--cores", "1", *TARGETS)
            assert code == 1
            assert f"\n{FULL}" in told
            assert "Traceback" not in told
            check_artifacts(disk)
            subprocess.run(["mount", "-o", "remount,size=128m", str(disk)], check=True)
            check_next_run(root, undisturbed)


def test_a_disk_without_a_byte_left(root: Path, tmp_path: Path) -> None:
    with mount(tmp_path / "disk", "-o", "size=2m") as disk:
        (root / "artifacts").symlink_to(disk)
        assert run(root, "artifacts/report/study.json")[0] == 0
        whole = (disk / "report/study.json").read_bytes()
        with pytest.raises(OSError, match="No space left"), (disk / "rest").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        command = [sys.executable, root / "scripts/quantmill", "report.write_study", disk / "report/study.json"]
        content = base64.b64encode(zlib.compress(b"x" * 10_000)).decode()
        result = subprocess.run(command, input=content, capture_output=True, text=True)
        assert result.returncode == 1
        assert result.stderr == FULL
        assert (disk / "report/study.json").read_bytes() == whole
        code, told = run(root, *TARGETS)
        assert code == 1
        assert told.splitlines()[-1] == f"error: {disk}: no space is left there; free some and run again"


def test_artifacts_that_may_not_be_written(root: Path) -> None:
    """By permissions, which root is bound by once it has given up to override them."""
    (root / "artifacts").mkdir(mode=0o555)
    bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] if os.getuid() == 0 else []
    command = [*bound, SNAKEMAKE, "--cores", "2", *TARGETS, "--configfile", "study.yaml"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: {root / 'artifacts'}: cannot be written by ")
    assert line.endswith("(Permission denied); make it writable, or link artifacts to another folder")
    assert "Traceback" not in result.stdout + result.stderr
    assert not list((root / "artifacts").iterdir())


def test_a_read_only_file_system(root: Path, tmp_path: Path) -> None:
    with mount(tmp_path / "disk", "-o", "ro") as disk:
        (root / "artifacts").symlink_to(disk)
        code, told = run(root, *TARGETS)
        assert code == 1
        assert re.match(r"error: .*disk: cannot be written by \w+ \(Read-only file system\)", told.splitlines()[-1])
        assert "Traceback" not in told


def test_a_killed_worker(root: Path, tools_python: Path, undisturbed: dict[str, str]) -> None:
    """Jobs that do not depend on a program that kill -9 ended are made, and the next run makes the rest."""
    python, moments = root / "python", random.Random(1)
    study = (root / "study.yaml").read_text()
    (root / "study.yaml").write_text(study.replace(str(tools_python), str(python)))
    for _ in range(ROUNDS):
        shutil.rmtree(root / "artifacts", ignore_errors=True)
        python.write_text(
            f'#!/bin/bash\ncase "$2" in checkpoint.to_bin) {tools_python} "$@" & sleep {moments.uniform(0, 0.3)}\n'
            f'kill -KILL $!; wait $!;; *) exec {tools_python} "$@";; esac\n'
        )
        python.chmod(0o755)
        code, told = run(root, *TARGETS)
        if code:  # else the program was faster
            assert "Error in rule bin" in told
            assert "exit code 137" in told or "non-zero exit code" in told
            assert not (root / "artifacts/demo/bin").exists()
            assert (root / TOKENS).exists()
        python.write_text(f'#!/bin/bash\nexec {tools_python} "$@"\n')
        check_next_run(root, undisturbed)


def test_a_killed_snakemake(root: Path, undisturbed: dict[str, str]) -> None:
    """Snakemake is ended by kill -9, and in turn its jobs as well."""
    moments, killed = random.Random(0), 0
    while killed < ROUNDS:
        shutil.rmtree(root / "artifacts", ignore_errors=True)
        process = start(root, *TARGETS, start_new_session=True)
        wait_for((root / "artifacts/.lock").exists)
        time.sleep(moments.uniform(0, 2))
        if process.poll() is not None:  # it was faster
            process.communicate()
            continue
        killed += 1
        if killed % 2:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate()
        wait_for(partial(has_ended, process.pid))
        for path in (root / "artifacts/demo").glob("*/quantmill.json"):  # under a final name everything is whole
            check_whole(path.parent)
        check_next_run(root, undisturbed)  # the same command; Snakemake's own lock is off
        assert "Nothing to be done" in run(root, *TARGETS)[1]


def has_ended(session: int) -> bool:
    """Return whether all processes of a session have ended."""
    command = ["ps", "-o", "stat=", "--sid", str(session)]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    return all(state.startswith("Z") for state in found.split())


def test_a_clock_that_jumps(root: Path, undisturbed: dict[str, str]) -> None:
    """The files' times are what a wrong clock would have given them; the machine's own clock is left alone."""
    artifacts = root / "artifacts/demo"
    assert run(root, *TARGETS)[0] == 0
    set_times(artifacts, time.time() + 3600)
    assert "Nothing to be done" in run(root, *TARGETS)[1]
    # the clock was an hour fast until safetensors was made, and was put right before the rest
    set_times(artifacts, time.time())
    set_times(artifacts / "safetensors", time.time() + 3600)
    code, told = run(root, *TARGETS)
    assert code == 1
    assert "could indicate a clock skew problem" in told
    assert check_artifacts(root / "artifacts") == {"source", "safetensors"}
    assert run(root, *TARGETS)[0] == 1  # and is not taken for done
    set_times(artifacts, time.time())
    check_next_run(root, undisturbed)


def set_times(folder: Path, seconds: float) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (seconds, seconds))


@contextmanager
def mount_slowly(folder: Path, place: Path) -> Iterator[Path]:
    """Mount a folder by a slow network file system (SFTP), or skip the test."""
    server = Path("/usr/lib/openssh/sftp-server")
    if not (shutil.which("sshfs") and shutil.which("fusermount3") and server.exists() and Path("/dev/fuse").exists()):
        pytest.skip("sshfs is not installed: apt-get install sshfs openssh-sftp-server")
    late = place.with_suffix(".late")
    late.write_text(LATE.format(server=str(server)))
    late.chmod(0o755)
    folder.mkdir(exist_ok=True)
    place.mkdir()
    command = ["sshfs", "-o", f"ssh_command={late}", f"host:{folder}", str(place)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["fusermount3", "-uz", str(place)], check=True)


def test_a_slow_network_file_system(root: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    with mount_slowly(tmp_path / "server", tmp_path / "mounted") as mounted:
        (root / "artifacts").symlink_to(mounted)
        code, told = run(root, *TARGETS)
        assert code == 0, told
        check_next_run(root, undisturbed)
