"""A packed environment installs without a network, for this or another machine; each error is one line."""

import io
import shutil
import tarfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from bundle_fixtures import MINOR, OFF, digest, install
from conftest import REPO

from quantmill.environments import bundle

BACKEND = """
import zipfile
def build_wheel(folder, settings=None, metadata=None):
    name = "NAME-1.0-py3-none-any.whl"
    files = {"NAME.py": "ANSWER = 7\\n", "NAME-1.0.dist-info/RECORD": "",
        "NAME-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: NAME\\nVersion: 1.0\\n",
        "NAME-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
    with zipfile.ZipFile(f"{folder}/{name}", "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return name
"""


def lines(folder: Path) -> list[str]:
    """Return the packages of a bundle."""
    return [line.split("==")[0] for line in (folder / "requirements.txt").read_text().splitlines()[2:]]


def test_same_wheels_give_the_same_bytes(pack: Callable, packed: Path, envs: Path, tmp_path: Path) -> None:
    out = shutil.copytree(packed, tmp_path / "again")
    for path in out.iterdir():
        path.write_text("of an earlier bundle")
    (out / "quantmill.json").write_bytes((packed / "quantmill.json").read_bytes())
    assert pack(out) is None  # replaces that
    wheels = [f"probe_{name}-1.0-py3-none-any.whl" for name in ("both", "cuda", "top")]
    names = ["pip.whl", *wheels, "quantmill.json", "requirements.txt"]
    assert sorted(path.name for path in packed.iterdir()) == sorted(path.name for path in out.iterdir()) == names
    assert all((out / name).read_bytes() == (packed / name).read_bytes() for name in names)
    sources = {
        **dict(zip(wheels, wheels, strict=True)),
        "pip.whl": f"pip-{distribution('pip').version}-py3-none-any.whl",
    }
    assert all((out / name).read_bytes() == (envs / "wheels" / source).read_bytes() for name, source in sources.items())
    hashed = [f"{name[:-21].replace('_', '-')}==1.0 --hash=sha256:{digest(out / name)}" for name in wheels]
    assert (out / "requirements.txt").read_text().splitlines() == ["--no-index", "--find-links .", *hashed]


def test_an_environment_installs_without_a_network(call: Callable, packed: Path, tmp_path: Path) -> None:
    print(f"network: {' '.join(OFF) or 'closed ports alone'}")
    target = tmp_path / "a place" / "probe"  # with a blank, which a program's first line cannot have
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nrequire-virtualenv = true\nno-index = false\n")
    result = install(call, packed, target, PIP_CONFIG_FILE=str(settings))
    assert result.returncode == 0, result.stderr
    code = "import probe_top, probe_both, sys; print(probe_top.ANSWER, sys.prefix)"
    assert call(target / "bin/python", "-I", "-c", code).stdout == f"42 {target}\n"
    assert call(target / "bin/probe").stdout == f"{target}\n"
    found = "from importlib.metadata import distributions; print(*sorted(each.name for each in distributions()))"
    assert call(target / "bin/python", "-I", "-c", found).stdout == "probe-both probe-cuda probe-top\n"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FAULTS = {
    "missing": (lambda path: path.unlink(), "No matching distribution found for probe-both==1.0"),
    "damaged": (flip, "THESE PACKAGES DO NOT MATCH THE HASHES"),
    "another Python": (
        lambda path: path.rename(path.with_name(f"probe_both-1.0-cp3{MINOR + 1}-cp3{MINOR + 1}-linux_x86_64.whl")),
        "No matching distribution found for probe-both==1.0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_pip_names_what_is_missing_or_damaged(fault: str, call: Callable, packed: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(packed, tmp_path / "copied")
    plant, expected = FAULTS[fault]
    plant(copied / "probe_both-1.0-py3-none-any.whl")
    result = install(call, copied, tmp_path / "env")
    assert result.returncode == 1
    assert expected in result.stderr
    assert "probe-both==1.0" in result.stderr
    assert call(tmp_path / "env/bin/python", "-c", "import probe_top").returncode == 1


def test_another_python_gets_its_own_wheels(pack: Callable, packed: Path, tmp_path: Path) -> None:
    """Evaluate markers for the target: pip would do so for the Python that runs it."""
    out = tmp_path / "out"
    assert pack(out, "--python-version", f"3.{MINOR - 1}", "--platform", "manylinux_2_28_x86_64") is None
    assert lines(packed) == ["probe-both", "probe-cuda", "probe-top"]
    assert lines(out) == ["probe-both", "probe-cuda", "probe-old", "probe-top"]


def test_an_environment_that_cannot_be_packed(envs: Path, pack: Callable, tmp_path: Path) -> None:
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
    assert line.endswith(f"for Python 3.{MINOR} on manylinux_2_28_x86_64, which lacks probe-both")
    assert pack(out, "--platform", "manylinux_2_28_aarch64", env="arm") is None
    assert "manylinux_2_28_aarch64" in (out / "quantmill.json").read_text()
    assert "no such file of pins; there are: " in pack(out, env="nowhere")
    assert "is not a version such as 3.12" in pack(out, "--python-version", "312")
    for wanted in ("win_amd64", "macosx_14_0_arm64", "manylinux2014_x86_64"):
        assert f"--platform {wanted}: is not a Linux with glibc" in pack(out, "--platform", wanted)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    assert "holds files that are not an artifact" in pack(tmp_path / "mine")


@pytest.mark.parametrize("name", ["probe_source", "connection_pool"])
def test_a_package_without_a_wheel(name: str, call: Callable, envs: Path, pack: Callable, tmp_path: Path) -> None:
    """It is built for this machine, and for others only if it is listed as pure Python."""
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    build += f'[project]\nname = "{name}"\nversion = "1.0"\n'
    about = f"Metadata-Version: 2.2\nName: {name}\nVersion: 1.0\n"
    source = envs / f"wheels/{name}-1.0.tar.gz"
    with tarfile.open(source, "w:gz") as tar:
        files = {"pyproject.toml": build, "backend.py": BACKEND.replace("NAME", name), "PKG-INFO": about}
        for inside, text in files.items():
            member = tarfile.TarInfo(f"{name}-1.0/{inside}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    package = name.replace("_", "-")
    (envs / "source.txt").write_text(f"{package}==1.0 \\\n    --hash=sha256:{digest(source)}\n")
    out, target = tmp_path / "out", tmp_path / "env"
    line = pack(out, "--python-version", f"3.{MINOR + 1}", env="source")
    if name == "probe_source":
        assert "probe-source==1.0 has no usable wheels" in line
        assert not out.exists()
    else:
        assert line is None
        assert lines(out) == [package]
    assert pack(out, env="source") is None
    assert install(call, out, target).returncode == 0
    assert call(target / "bin/python", "-c", f"import {name}; print({name}.ANSWER)").stdout == "7\n"


def test_llama_cpp_brings_its_sources(envs: Path, pack: Callable, tmp_path: Path) -> None:
    (envs / "llama_cpp.txt").write_text("probe-both==1.0\n")
    (envs / "llama-cpp-python.sdist").write_text(f"llama-cpp-python==0.3.36 --hash=sha256:{'ab' * 32}\n")
    inside = "llama-cpp-python-0.3.36-abababababab"
    sources = tmp_path / "cache/quantmill" / inside
    (sources / "source").mkdir(parents=True)
    for name in (".lock", "ready", "source/build.sh"):
        (sources / name).write_text(name)
    (sources / "source/build.sh").chmod(0o755)
    out = tmp_path / "out"
    assert pack(out, env="llama_cpp", XDG_CACHE_HOME=str(tmp_path / "cache")) is None
    files = {str(path.relative_to(out / "cache")): path for path in (out / "cache").rglob("*") if path.is_file()}
    assert sorted(files) == [f"{inside}/ready", f"{inside}/source/build.sh"]
    assert files[f"{inside}/source/build.sh"].stat().st_mode & 0o777 == 0o755


def test_pins_are_read_whole() -> None:
    for path in sorted((REPO / "envs").glob("*.txt")):
        lines = [line for line in path.read_text().splitlines() if line[:1].isalnum()]
        pins = bundle.read_pins(path)
        assert len(pins) == len(lines), path
        unhashed = [name for (name, _), hashes in pins.items() if not hashes]
        assert unhashed == [name for name, _ in pins if name == "torch"], path
        assert sum(map(len, pins.values())) == path.read_text().count("--hash=sha256:"), path
