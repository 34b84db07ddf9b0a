"""The compilation of llama.cpp: once, resumable, and refused in a line; with stand-ins for cmake and the sources.

The real compilation is that of tests/gguf, which take what it made.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO, line_of_refusal

from quantmill.llamacpp import compile

HEADER = "// llama.h\n"
CMAKE = """#!/bin/bash
echo "$@" >> {calls}
[ -e {broken} ] && {{ echo "error: no space left" >&2; exit 1; }}
[ -e {hangs} ] && {{ sleep 100 & echo $! > {hangs}; wait; }}
[ "$1" = --build ] && mkdir -p "$2/bin"
exit 0
"""
COMMAND = (sys.executable, REPO / "scripts/quantmill", "llamacpp.compile")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a cache whose sources are there already."""
    content = (REPO / "envs/llama-cpp-python.sdist").read_text()
    name, version, digest = re.search(r"^([\w-]+)==([\w.]+) --hash=sha256:(\w+)", content, re.MULTILINE).groups()
    folder = tmp_path / f"cache/quantmill/{name}-{version}-{digest[:12]}"
    (folder / "source/include").mkdir(parents=True)
    (folder / "source/include/llama.h").write_text(HEADER)
    (folder / "binding/llama_cpp").mkdir(parents=True)
    (folder / "ready").touch()
    return folder


@pytest.fixture
def compile_it(tmp_path: Path, sources: Path, call: Callable) -> Callable:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "cmake").write_text(CMAKE.format(**{name: tmp_path / name for name in ("calls", "broken", "hangs")}))
    (tools / "cmake").chmod(0o755)

    def run(*options: object, **environment: str) -> str | None:
        """Return the line of a refusal; None where it went well."""
        result = call(
            *COMMAND,
            tmp_path / "out",
            "--tools",
            tools,
            *options,
            XDG_CACHE_HOME=str(tmp_path / "cache"),
            **environment,
        )
        return line_of_refusal(result, tmp_path / "out")

    return run


def steps(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_it_is_compiled_once_and_resumes(compile_it: Callable, tmp_path: Path, sources: Path) -> None:
    (tmp_path / "broken").touch()
    assert compile_it().startswith("error: llama.cpp did not compile (cmake -G: exit code 1)")
    (tmp_path / "broken").unlink()
    assert compile_it() is None
    assert steps(tmp_path) == ["-G", "-G", "--build"]
    assert compile_it() is None
    assert steps(tmp_path) == ["-G", "-G", "--build"]  # from the cache
    found = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert found["sources"] == sources.name
    assert (tmp_path / "out/source").resolve() == sources / "source"
    assert (
        len(set(re.findall(" -B ([^ ]+)", (tmp_path / "calls").read_text()))) == 1
    )  # what was broken off goes on there


def test_what_a_compilation_started_ends_with_it(compile_it: Callable, tmp_path: Path) -> None:
    """An interrupt ends ninja and its compilers too, which would go on in the next compilation's folder."""
    child = tmp_path / "hangs"
    child.touch()
    command = [*COMMAND, tmp_path / "out", "--tools", tmp_path / "tools"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as compiling:
        pid = wait_for_pid(child)
        compiling.send_signal(signal.SIGTERM)
        assert compiling.communicate()[1].splitlines()[-1] == "error: interrupted; nothing was written"
    wait_for_end(pid)
    child.unlink()
    assert compile_it() is None


def test_llama_cpps_program_ends_with_its_caller(tmp_path: Path) -> None:
    child, compiled = tmp_path / "pid", tmp_path / "llama.cpp"
    (compiled / "bin").mkdir(parents=True)
    (compiled / "quantmill.json").write_text("{}")
    (compiled / "bin/llama-imatrix").write_text(f"#!/bin/sh\necho $$ > {child}\nexec sleep 100\n")
    (compiled / "bin/llama-imatrix").chmod(0o755)
    command = [sys.executable, "-c", "from quantmill import llamacpp; llamacpp.call('llama-imatrix')"]
    environment = os.environ | {"QUANTMILL_LLAMA_CPP": str(compiled)}
    with subprocess.Popen(command, cwd=REPO / "scripts", env=environment, stderr=subprocess.PIPE) as calling:
        pid = wait_for_pid(child)
        calling.kill()
    wait_for_end(pid)


def wait_for_pid(file: Path) -> int:
    """Return the number of a process that writes it to a file."""
    end = time.monotonic() + 30
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < end, "it did not start"
        time.sleep(0.05)
    return int(file.read_text())


def wait_for_end(pid: int) -> None:
    """Until a process has ended, in some seconds."""
    end = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end, "it still runs"
            time.sleep(0.05)


def test_sources_are_unpacked_without_tarfile_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's own is 3.11.2."""
    inside = {
        "vendor/llama.cpp/include/llama.h": "source/include/llama.h",
        "llama_cpp/llama.py": "binding/llama_cpp/llama.py",
    }
    with tarfile.open(tmp_path / "sources.tar.gz", "w:gz") as tar:
        for name in [*inside, "vendor/llama.cpp/docs/long.md", "README.md"]:
            (tmp_path / "file").write_text(name)
            tar.add(tmp_path / "file", f"llama_cpp_python-1/{name}")
    extract = tarfile.TarFile.extract
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(tarfile.TarFile, "extract", lambda tar, member, path="": extract(tar, member, path))
    compile.unpack(tmp_path / "sources.tar.gz", tmp_path / "out")
    files = {str(path.relative_to(tmp_path / "out")): path.read_text() for path in (tmp_path / "out").rglob("*.*")}
    assert files == {place: name for name, place in inside.items()}


def test_another_compiler_makes_another_build(compile_it: Callable, tmp_path: Path) -> None:
    assert compile_it() is None
    other = tmp_path / "c++"
    other.write_text("#!/bin/sh\necho other 1.0\n")
    other.chmod(0o755)
    assert compile_it(CXX=str(other)) is None
    assert steps(tmp_path) == ["-G", "--build"] * 2


def test_a_static_libstdc_alone_is_refused(compile_it: Callable, tmp_path: Path) -> None:
    other = tmp_path / "c++"
    other.write_text("#!/bin/sh\ncase $1 in *.a) echo /lib/libstdc++.a;; *.so) echo libstdc++.so;; *) echo 1;; esac\n")
    other.chmod(0o755)
    line = compile_it(CXX=str(other))
    assert line.startswith(
        f"error: {other} has only libstdc++.a, and Python's processes crash with libraries that contain it"
    )
    assert not steps(tmp_path)


def test_a_machine_without_a_compiler_is_one_line(compile_it: Callable, tmp_path: Path) -> None:
    line = compile_it(PATH=str(tmp_path), CXX="")
    assert line.startswith("error: llama.cpp is compiled here, and there is no C++ compiler; install one (g++)")


def test_instruction_sets_are_those_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compile.cpu, "features", lambda: ["avx", "avx2", "sse4_2", "fma", "amx_int8"])
    found = compile.flags({})
    assert {name for name, value in found.items() if value == "ON" and name[5:] in compile.INSTRUCTION_SETS} == {
        "GGML_AVX",
        "GGML_AVX2",
        "GGML_SSE42",
        "GGML_FMA",
    }
    assert found["GGML_NATIVE"] == "OFF"
    assert not [name for name in found if "AMX" in name or "CUDA" in name]


def test_cuda_is_compiled_for_the_gpus_that_are_there(compile_it: Callable, tmp_path: Path) -> None:
    """Two kinds of GPUs, one of them twice, told by stand-ins for nvcc and nvidia-smi; then a broken driver."""
    programs = tmp_path / "cuda"
    programs.mkdir()

    def stand_in(name: str, lines: str, status: int = 0) -> None:
        (programs / name).write_text(f"#!/bin/sh\nprintf '{lines}'\nexit {status}\n")
        (programs / name).chmod(0o755)

    def definitions() -> set[str]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert compile_it(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}") is None
        line = next(line for line in reversed((tmp_path / "calls").read_text().splitlines()) if line.startswith("-G"))
        return {word for word in line.split() if "CUDA" in word}

    stand_in("nvcc", "Cuda compiler\\nCuda compilation tools, release 13.0, V13.0.88\\n")
    stand_in("nvidia-smi", "9.0\\n12.0\\n9.0\\n")
    asked = {"-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={programs}/nvcc"}
    assert definitions() == asked | {"-DCMAKE_CUDA_ARCHITECTURES=120-real;90-real"}
    record = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert record["nvcc"] == "Cuda compilation tools, release 13.0, V13.0.88"
    stand_in("nvidia-smi", "NVIDIA-SMI has failed because it could not talk to the driver.\\n", status=9)
    assert definitions() == set()
    stand_in("nvidia-smi", "No devices were found\\n")
    assert definitions() == set()


def test_a_users_build_is_taken_if_it_fits(compile_it: Callable, tmp_path: Path) -> None:
    theirs, build = tmp_path / "theirs", tmp_path / "theirs/build"
    (theirs / "include").mkdir(parents=True)
    (build / "bin").mkdir(parents=True)
    assert "is not a finished build of llama.cpp" in compile_it("--build", build)
    (build / "bin/llama-quantize").touch()
    (build / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={theirs}\nGGML_AVX:BOOL=ON\n")
    (theirs / "include/llama.h").write_text(HEADER + "// newer\n")
    assert "its llama.h is not that of llama-cpp-python" in compile_it("--build", build)
    (theirs / "include/llama.h").write_text(HEADER)
    assert compile_it("--build", build) is None
    assert not steps(tmp_path)
    found = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert found["own"]
    assert found["instruction_sets"] == ["AVX"]
    assert (tmp_path / "out/bin").readlink() == build / "bin"
