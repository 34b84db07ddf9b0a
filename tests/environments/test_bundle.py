"""An environment is packed: in parts, for this or another machine, the same bytes each time, or refused in a line."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from bundle_fixtures import MINOR, PART, digest, unpack, wait_for
from conftest import REPO

from quantmill.environments import bundle

BACKEND = """
import zipfile
def build_wheel(folder, settings=None, metadata=None):
    name = "probe_source-1.0-py3-none-any.whl"
    files = {"probe_source.py": "ANSWER = 7\\n", "probe_source-1.0.dist-info/RECORD": "",
        "probe_source-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: probe-source\\nVersion: 1.0\\n",
        "probe_source-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
    with zipfile.ZipFile(f"{folder}/{name}", "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return name
"""


def test_the_same_wheels_make_the_same_bytes(call: Callable, pack: Callable, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    assert pack(out) is None
    assert pack(out) is None  # over one that is there
    names = sorted(path.name for path in packed.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    assert all((out / name).read_bytes() == (packed / name).read_bytes() for name in names)
    checked = call("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=out)
    assert checked.stdout.splitlines() == [f"{line.split()[1]}: OK" for line in (out / "SHA256SUMS").open()]
    assert len(checked.stdout.splitlines()) == len(names) - 1


def test_parts_are_no_larger_than_asked_and_are_one_tar_file(envs: Path, packed: Path) -> None:
    parts = sorted(packed.glob("probe.tar.*"))
    sizes = [path.stat().st_size for path in parts]
    assert len(parts) > 2
    assert set(sizes[:-1]) == {PART}
    assert 0 < sizes[-1] <= PART
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in parts))) as tar:
        held = {member.name: tar.extractfile(member).read() for member in tar}
        assert {(member.mtime, member.uid, member.uname) for member in tar.getmembers()} == {(0, 0, "")}
    wheels = [*(f"probe_{name}-1.0" for name in ("both", "cuda", "top")), f"pip-{distribution('pip').version}"]
    expected = {f"wheels/{name}-py3-none-any.whl" for name in wheels}
    assert held == {name: (envs / name).read_bytes() for name in expected}
    assert list(held) == sorted(expected)


@pytest.mark.parametrize("sizes", [[PART], [PART - 1, 1], [1, PART], [2 * PART, 5]])
def test_a_part_that_is_full_is_the_last_one(sizes: list[int], tmp_path: Path) -> None:
    parts = bundle.Parts(tmp_path, "x", PART)
    for size in sizes:
        parts.write(b"a" * size)
    parts.close()
    total = sum(sizes)
    assert [path.stat().st_size for path in sorted(tmp_path.iterdir())] == [
        PART if number < total // PART else total % PART for number in range(-(-total // PART))
    ]
    assert parts.sums == {path.name: digest(path) for path in tmp_path.iterdir()}


@pytest.mark.parametrize("begun", ["work", "partial"])
def test_packing_that_is_killed_leaves_no_bundle(
    begun: str, envs: Path, pack: Callable, packed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        REPO / "scripts/quantmill",
        "environments.bundle",
        envs / "probe.txt",
        out,
        "--part-size",
        "1M",
    ]
    # pip is asked for nothing that it could download
    environment = {
        "PATH": "/usr/bin:/bin",
        "PIP_FIND_LINKS": str(envs / "wheels"),
        "PIP_NO_INDEX": "1",
        "HOME": str(tmp_path / "home"),
    }
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        wait_for(tmp_path / f".out.{begun}", process)
        process.kill()
    assert not out.exists()
    assert pack(out) is None
    assert (out / "SHA256SUMS").read_bytes() == (packed / "SHA256SUMS").read_bytes()


def test_wheels_that_were_downloaded_are_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"p{number:02d}" for number in range(25)]
    requirements = {(name, "1.0+cpu"): ["0" * 64, hashlib.sha256(name.encode()).hexdigest()] for name in names}
    folder, calls = tmp_path / "wheels", []

    def download(command: list[str], environment: dict[str, str]) -> None:
        """pip, whose network fails in the third batch at the first try."""
        asked = [line.split("==")[0] for line in Path(command[-1]).read_text().splitlines()]
        calls.append(asked)
        if len(calls) == 3:
            raise bundle.UserError("no network")
        for name in asked:
            (folder / f"{name}-1.0+cpu-py3-none-any.whl").write_text(name)

    monkeypatch.setattr(bundle, "call", download)
    target = bundle.Target("3.12", "x86_64", (2, 28), False)
    with pytest.raises(bundle.UserError, match="no network"):
        bundle.fetch(requirements, target, folder)
    (folder / "p03-1.0+cpu-py3-none-any.whl").write_text("p")  # half of it
    wheels = bundle.fetch(requirements, target, folder)
    assert calls == [names[:10], names[10:20], names[20:], ["p03", *names[20:]]]
    assert [path.read_text() for path in wheels] == names
    bundle.fetch(requirements, bundle.Target("3.11", "x86_64", (2, 28), False), folder)
    assert calls[4:] == [names[:10], names[10:20], names[20:]]  # wheels of another Python


def test_what_cannot_be_packed_is_one_line(envs: Path, pack: Callable, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (envs / "forged.txt").write_text(f"probe-both==1.0 \\\n    --hash=sha256:{'1' * 64}\n")
    line = pack(out, env="forged")
    assert "DO NOT MATCH THE HASHES" in line
    assert "probe-both==1.0" in line
    (envs / "lost.txt").write_text("probe-lost==1.0\n")
    assert "probe-lost was not found" in pack(out, env="lost")
    (envs / "arm.txt").write_text("probe-both==1.0 ; platform_machine == 'aarch64'\nprobe-top==1.0\n")
    (envs / "arm.in").write_text("probe-both\n")
    line = pack(out, "--platform", "manylinux_2_28_x86_64", env="arm")
    assert line.endswith(f"for Python 3.{MINOR} on manylinux_2_28_x86_64: probe-both cannot be had there")
    assert pack(out, "--platform", "manylinux_2_28_aarch64", env="arm") is None
    assert json.loads((out / "quantmill.json").read_text())["machine"] == "aarch64"
    assert "no such file of pins; there are: " in pack(out, env="nowhere")
    assert "is no version such as 3.12" in pack(out, "--python-version", "312")
    for wanted in ("win_amd64", "macosx_14_0_arm64", "manylinux2014_x86_64"):
        assert f"--platform {wanted}: is no Linux with glibc" in pack(out, "--platform", wanted)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    assert "holds files that are not an artifact" in pack(tmp_path / "mine")


@pytest.mark.parametrize(("text", "size"), [("1M", 2**20), ("700M", 700 * 2**20), ("4G", 2**32), ("1048576", 2**20)])
def test_sizes_of_parts(text: str, size: int) -> None:
    assert bundle.part_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "5", "1023K", "G", "-1G", "1.5G", "1T"])
def test_what_is_no_size_of_a_part(text: str) -> None:
    with pytest.raises(bundle.ArgumentTypeError, match="is no size of 1M or more"):
        bundle.part_size(text)


def test_a_package_without_a_wheel_is_built_here_and_refused_for_elsewhere(
    call: Callable, envs: Path, pack: Callable, tmp_path: Path
) -> None:
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    build += '[project]\nname = "probe-source"\nversion = "1.0"\n'
    about = "Metadata-Version: 2.2\nName: probe-source\nVersion: 1.0\n"
    source = envs / "wheels/probe_source-1.0.tar.gz"
    with tarfile.open(source, "w:gz") as tar:
        for name, text in {"pyproject.toml": build, "backend.py": BACKEND, "PKG-INFO": about}.items():
            member = tarfile.TarInfo(f"probe_source-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    (envs / "source.txt").write_text(f"probe-source==1.0 \\\n    --hash=sha256:{digest(source)}\n")
    out, target = tmp_path / "out", tmp_path / "env"
    line = pack(out, "--python-version", f"3.{MINOR + 1}", env="source")
    assert "probe-source==1.0 has no usable wheels" in line
    assert not out.exists()
    assert pack(out, env="source") is None
    assert unpack(call, out, target).returncode == 0
    assert call(target / "bin/python", "-c", "import probe_source; print(probe_source.ANSWER)").stdout == "7\n"


def test_llama_cpps_environment_brings_the_sources_that_it_compiles(
    call: Callable, envs: Path, pack: Callable, tmp_path: Path
) -> None:
    (envs / "llama_cpp.txt").write_text("probe-both==1.0\n")
    (envs / "llama-cpp-python.sdist").write_text(f"llama-cpp-python==0.3.36 --hash=sha256:{'ab' * 32}\n")
    inside = "quantmill/llama-cpp-python-0.3.36-abababababab"
    sources = tmp_path / "cache" / inside
    (sources / "source").mkdir(parents=True)
    (sources / "ready").touch()
    (sources / "source/CMakeLists.txt").write_text("project(llama)\n")
    (sources / "source/build.sh").write_text("exit\n")
    (sources / "source/build.sh").chmod(0o755)
    out, there = tmp_path / "out", tmp_path / "there"
    assert pack(out, env="llama_cpp", XDG_CACHE_HOME=str(tmp_path / "cache")) is None
    for number in range(2):  # the second time the sources are there already
        assert unpack(call, out, tmp_path / f"env{number}", XDG_CACHE_HOME=str(there)).returncode == 0
    files = {str(path.relative_to(there)): path for path in there.rglob("*") if path.is_file()}
    assert sorted(files) == [f"{inside}/ready", f"{inside}/source/CMakeLists.txt", f"{inside}/source/build.sh"]
    assert files[f"{inside}/source/CMakeLists.txt"].read_text() == "project(llama)\n"
    assert files[f"{inside}/source/build.sh"].stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("wheel", "glibc"),
    [
        ("tqdm-4.70.1-py3-none-any.whl", (0, 0)),
        ("numpy-2.4.6-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", (2, 27)),
        ("pyyaml-6.0.3-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", (2, 17)),
        ("x-1-cp38-abi3-manylinux1_x86_64.whl", (2, 5)),
        ("autoawq-0.2.9-cp311-cp311-linux_x86_64.whl", (2, 36)),
    ],
)
def test_the_glibc_that_a_wheel_wants(wheel: str, glibc: tuple[int, int]) -> None:
    assert bundle.wanted_glibc(wheel, bundle.Target("3.12", "x86_64", (2, 36), True)) == glibc


def test_pins_are_read_whole() -> None:
    for path in sorted((REPO / "envs").glob("*.txt")):
        lines = [line for line in path.read_text().splitlines() if line[:1].isalnum()]
        pins = bundle.read_pins(path)
        assert len(pins) == len(lines), path
        unhashed = [name for (name, _), hashes in pins.items() if not hashes]
        assert unhashed == [name for name, _ in pins if name == "torch"], path
        assert sum(map(len, pins.values())) == path.read_text().count("--hash=sha256:"), path
