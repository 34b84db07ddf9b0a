"""What was packed is installed where there is no network; and what was lost on the way, or does not fit, is named."""

import ast
import fcntl
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_fixtures import MINOR, OFF, PART, digest, unpack, wait_for
from conftest import REPO

from quantmill.environments import bundle


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    """The bundle as somebody carried it, who may have lost something."""
    return shutil.copytree(packed, tmp_path / "copied")


def refusal(result: subprocess.CompletedProcess[str], target: Path) -> str:
    """The one line, after which nothing is there."""
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert not target.exists()
    assert not list(target.parent.glob(f".{target.name}.*"))
    return result.stderr.splitlines()[-1]


def change(folder: Path, **facts: object) -> None:
    """Another bundle of the same parts, with hashes that are right."""
    path = folder / "quantmill.json"
    before = digest(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    sums = folder / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(before, digest(path)))


def test_an_environment_is_installed_with_the_network_off(call: Callable, packed: Path, tmp_path: Path) -> None:
    print(f"network: {' '.join(OFF) or 'closed ports alone'}")
    target = tmp_path / "a place" / "probe"  # with a blank, which a program's first line cannot have
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nrequire-virtualenv = true\nno-index = false\nonly-binary = :none:\n[install]\nuser = true\n"
    )
    result = unpack(call, packed, target, PIP_CONFIG_FILE=str(settings))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"interpreters: {{probe: {target}/bin/python}}\n"
    code = "import probe_top, probe_both, sys; print(probe_top.ANSWER, sys.prefix)"
    assert call(target / "bin/python", "-I", "-c", code).stdout == f"42 {target}\n"
    assert call(target / "bin/probe").stdout == f"{target}\n"
    found = "from importlib.metadata import distributions; print(*sorted(each.name for each in distributions()))"
    assert call(target / "bin/python", "-I", "-c", found).stdout == "probe-both probe-cuda probe-top\n"
    assert call("bash", "-c", '. "$0/bin/activate"; echo "$VIRTUAL_ENV"', target).stdout == f"{target}\n"
    assert [path.name for path in target.parent.iterdir()] == ["probe"]
    holding = subprocess.run(["grep", "-rIl", ".probe.unpack", target], capture_output=True, text=True)
    assert holding.stdout == ""


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


PLANTED = {
    "missing": (lambda folder: (folder / "probe.tar.001").unlink(), "missing: probe.tar.001; copy it"),
    "two missing": (
        lambda folder: [(folder / f"probe.tar.00{number}").unlink() for number in (0, 2)],
        "missing: probe.tar.000, probe.tar.002; copy",
    ),
    "flipped": (
        lambda folder: flip(folder / "probe.tar.002"),
        "broken (not the SHA-256 of SHA256SUMS): probe.tar.002;",
    ),
    "cut": (lambda folder: (folder / "probe.tar.000").write_bytes(b""), "SHA256SUMS): probe.tar.000;"),
    "facts": (lambda folder: flip(folder / "quantmill.json"), "SHA256SUMS): quantmill.json;"),
    "no sums": (lambda folder: (folder / "SHA256SUMS").unlink(), "SHA256SUMS is missing; copy it"),
    "sums": (lambda folder: (folder / "SHA256SUMS").write_text("1234  x\n"), "SHA256SUMS is broken; copy it"),
    "sums cut": (
        lambda folder: (folder / "SHA256SUMS").write_text((folder / "SHA256SUMS").read_text().split("\n", 1)[1]),
        "SHA256SUMS): probe.tar.000;",
    ),
    "machine": (lambda folder: change(folder, machine="riscv128"), "is for riscv128, and this machine is "),
    "glibc": (lambda folder: change(folder, glibc="2.99"), "wants glibc 2.99, and this machine has glibc 2."),
    "disk": (lambda folder: change(folder, installed_bytes=10**18), " and 1000000000.0 are needed; free some"),
    "a package": (lambda folder: change(folder, packages=["probe-lost==1.0"]), "found for probe-lost==1.0)"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_what_was_lost_or_does_not_fit_is_one_line(fault: str, call: Callable, copied: Path, tmp_path: Path) -> None:
    plant, expected = PLANTED[fault]
    plant(copied)
    target = tmp_path / "env"
    assert expected in refusal(unpack(call, copied, target), target)


def test_a_part_that_leaves_its_folder_is_refused(call: Callable, copied: Path, tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("x")
    for part in copied.glob("probe.tar.*"):
        part.unlink()
    sums = bundle.pack(copied, "probe", {"wheels/../../../evil": tmp_path / "evil"}, PART)
    with (copied / "SHA256SUMS").open("a") as file:
        file.writelines(f"{value}  {name}\n" for name, value in sums.items())
    change(copied, parts=list(sums))
    lines = (copied / "SHA256SUMS").read_text().splitlines()
    (copied / "SHA256SUMS").write_text("".join(f"{line}\n" for line in lines if (copied / line.split()[1]).exists()))
    target = tmp_path / "a/env"
    assert "wheels/../../../evil is no file of a bundle" in refusal(unpack(call, copied, target), target)


def test_another_python_gets_the_wheels_of_its_own(call: Callable, pack: Callable, tmp_path: Path) -> None:
    """Markers are those of the target: pip alone would ask the Python that runs it."""
    out, target = tmp_path / "out", tmp_path / "env"
    assert pack(out, "--python-version", f"3.{MINOR - 1}", "--platform", "manylinux_2_28_x86_64") is None
    facts = json.loads((out / "quantmill.json").read_text())
    assert facts["packages"] == ["probe-both==1.0", "probe-cuda==1.0", "probe-old==1.0", "probe-top==1.0"]
    assert (facts["python"], facts["machine"]) == (f"3.{MINOR - 1}", "x86_64")
    line = refusal(unpack(call, out, target), target)
    assert f"is for Python 3.{MINOR - 1}, and this is CPython 3.{MINOR}." in line
    assert f"run it as python3.{MINOR - 1} unpack.py" in line


def test_a_folder_that_exists_is_left_alone(call: Callable, packed: Path, tmp_path: Path) -> None:
    target = tmp_path / "env"
    target.mkdir()
    (target / "mine").write_text("mine")
    result = unpack(call, packed, target)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"error: {target}: exists; name a folder that does not"
    assert [path.name for path in tmp_path.rglob("*")] == ["env", "mine"]


def test_old_pythons_can_read_the_refusal() -> None:
    ast.parse((REPO / "scripts/quantmill/environments/unpack_bundle.py").read_text(), feature_version=(3, 9))


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_unpacking_that_is_killed_leaves_nothing_and_goes_well_the_next_time(
    signal_name: str, call: Callable, packed: Path, tmp_path: Path
) -> None:
    target = tmp_path / "env"
    with subprocess.Popen([sys.executable, packed / "unpack.py", target], stderr=subprocess.PIPE, text=True) as process:
        wait_for(tmp_path / ".env.unpack/packages.txt", process)  # pip is about to start
        process.send_signal(signal.Signals[signal_name])
        said = process.communicate()[1]
    assert not target.exists()
    if signal_name == "SIGTERM":
        assert said.splitlines()[-1] == "error: interrupted; nothing was installed"
        assert not list(tmp_path.iterdir())
    else:
        assert [path.name for path in tmp_path.iterdir()] == [".env.unpack"]
    result = unpack(call, packed, target)
    assert result.returncode == 0, result.stderr
    assert call(target / "bin/python", "-c", "import probe_top").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_two_that_unpack_to_one_folder_wait_for_each_other(packed: Path, tmp_path: Path) -> None:
    target, work = tmp_path / "env", tmp_path / ".env.unpack"
    work.mkdir()
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, packed / "unpack.py", target]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            said = iter(process.stderr.readline, "")
            assert any(line.startswith("Waiting for another run") for line in said)
            assert [path.name for path in work.iterdir()] == ["lock"]
            shutil.rmtree(work)  # as the other one does at its end
            fcntl.flock(lock, fcntl.LOCK_UN)
            printed, rest = process.communicate()
    assert printed.startswith("interpreters: "), rest
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


def test_a_large_file_takes_no_memory(call: Callable, tmp_path: Path) -> None:
    size = 300 * 2**20
    with (tmp_path / "large.whl").open("wb") as file:
        file.truncate(size)
    code = (
        "import sys; sys.path.insert(0, 'scripts'); from pathlib import Path\n"
        "from quantmill.environments import bundle, unpack_bundle\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "parts = bundle.pack(folder, 'x', {'wheels/large.whl': folder / 'large.whl'}, 100 * 2**20)\n"
        "unpack_bundle.extract([folder / name for name in parts], folder / 'there')\n"
        "from quantmill.common.manifest import peak_rss_bytes; print(len(parts), peak_rss_bytes())"
    )
    result = call(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    count, peak = map(int, result.stdout.split())
    assert count == 4  # the tar file's own blocks come to the 300 MiB
    assert peak < 100 * 2**20
    assert (tmp_path / "there/wheels/large.whl").stat().st_size == size
