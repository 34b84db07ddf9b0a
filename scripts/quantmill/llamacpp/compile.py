"""Compile llama.cpp for this machine, once, or take an existing build.

    python scripts/quantmill llamacpp.compile DST [--tools ENV/bin] [--build PATH/TO/build]

The sources are those of envs/llama-cpp-python.sdist, which pip fetches and whose hash it checks. The result is kept in
the user's cache folder (~/.cache/quantmill), under the hash of sources, flags and compiler, so that checkouts share it.
An interrupted compilation resumes. DST holds links to the result. With nvcc and a GPU it is compiled for CUDA too, for
this machine's GPUs.

It uses the instruction sets that the processor reports, without AMX, which can trap on a virtual machine that lists it.
Your own build (--build) must have the same llama.h, because the Python binding is made for it.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from quantmill.common import manifest, surroundings
from quantmill.common.atomic import write_atomically
from quantmill.common.cache_folder import cache, lock
from quantmill.common.program import PACKAGE, UserError, parser, run_compiler
from quantmill.devices import cpu

PINS = PACKAGE.parents[1] / "envs/llama-cpp-python.sdist"
TARGETS = ["llama", "llama-quantize", "llama-imatrix", "llama-perplexity", "llama-bench", "llama-server"]
FLAGS = {"CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "ON"}
FLAGS |= dict.fromkeys(("GGML_CCACHE", "GGML_NATIVE", "LLAMA_OPENSSL"), "OFF")
FLAGS |= {f"LLAMA_BUILD_{part}": "OFF" for part in ("TESTS", "EXAMPLES", "APP", "UI")}
FLAGS |= {"LLAMA_USE_PREBUILT_UI": "OFF"}  # would be downloaded
# llama.cpp's names on x86 -> Linux's; AMX is left out
INSTRUCTION_SETS = {"SSE42": "sse4_2", "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "BMI2": "bmi2"}
INSTRUCTION_SETS |= {"AVX_VNNI": "avx_vnni", "AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi"}
INSTRUCTION_SETS |= {"AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16"}
OWN = ("GGML_", "LLAMA_", "CMAKE_CUDA_ARCHITECTURES")  # definitions of the user's build that are recorded
LEFT_OUT = ("docs", "models", "tests", "examples", "media", "benches")  # half of the sources' size
CUDA = "/usr/local/cuda/bin"  # where nvcc is installed, even if it is not on PATH
STATUS = "%p [%f/%t] "  # ninja's progress: percent, and files of all files


def flags(cuda: dict[str, str]) -> dict[str, str]:
    """Return CMake's definitions for this machine, with those of `cuda_flags`."""
    found = dict(FLAGS)
    if platform.machine() in ("x86_64", "AMD64"):
        features = set(cpu.features())
        found |= {f"GGML_{name}": "ON" if word in features else "OFF" for name, word in INSTRUCTION_SETS.items()}
    else:
        found["GGML_NATIVE"] = "ON"
    return found | cuda


def cuda_flags() -> dict[str, str]:
    """Return the definitions for CUDA, for this machine's GPUs; none without a GPU or nvcc."""
    compiler = shutil.which("nvcc", path=f"{os.environ['PATH']}{os.pathsep}{CUDA}")
    if not compiler or not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    capabilities = sorted(set(re.findall(r"^(\d+)\.(\d+)\s*$", result.stdout, re.MULTILINE)))
    if result.returncode or not capabilities:
        return {}
    architectures = ";".join(f"{major}{minor}-real" for major, minor in capabilities)  # without PTX for others
    return {"GGML_CUDA": "ON", "CMAKE_CUDA_COMPILER": compiler, "CMAKE_CUDA_ARCHITECTURES": architectures}


def compiler() -> str:
    """Return the C++ compiler's name and version.

    Raises `UserError` if there is none, or only one that links libstdc++ statically: Python's processes cannot load
    such libraries, whose C++ runtime conflicts with the loaded one.
    """
    name = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if not name or not shutil.which(name):
        raise UserError(
            "llama.cpp is compiled here, and there is no C++ compiler; install one (g++), name a build with "
            "`llama_cpp` in the config, or leave out the formats gguf-*"
        )
    shared, static = (Path(ask(name, f"-print-file-name=libstdc++.{kind}")).is_absolute() for kind in ("so", "a"))
    if static and not shared:
        raise UserError(
            f"{shutil.which(name)} has only libstdc++.a, and Python's processes crash with libraries that contain it; "
            "name another compiler: CC, CXX and, for CUDA, CUDAHOSTCXX (such as /usr/bin/cc and /usr/bin/c++)"
        )
    return ask(name, "--version").splitlines()[0]


def ask(program: str, option: str) -> str:
    """Return a program's output for an option."""
    return subprocess.run([program, option], capture_output=True, text=True).stdout


def fetch_sources(pins: Path) -> Path:
    """Return the unpacked sources that `pins` names, from the cache or from pip."""
    match = re.search(
        r"^([\w-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})", pins.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert match, pins
    target = cache() / f"{match[1]}-{match[2]}-{match[3][:12]}"
    with lock(target):
        if not (target / "ready").exists():
            command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
            command += ["--require-hashes", "--dest", str(target), "-r", str(pins)]
            result = subprocess.run(command, env=surroundings.of_child(command), stdout=sys.stderr)
            archives = list(target.glob("*.tar.gz"))
            if result.returncode or not archives:
                raise UserError(f"pip could not fetch {match[1]} {match[2]}, llama.cpp's sources; its messages say why")
            unpack(archives[0], target)
            archives[0].unlink()
            (target / "ready").touch()
    return target


def unpack(archive: Path, target: Path) -> None:
    """Unpack llama.cpp's sources into `source`, and the binding's package into `binding/llama_cpp`."""
    places = {"vendor/llama.cpp": "source", "llama_cpp": "binding/llama_cpp"}
    with tarfile.open(archive) as tar:
        # Python has filters since 3.11.4; without one this is as safe as the archive, whose hash is pinned
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        for member in tar:
            _, _, name = member.name.partition("/")
            for inside, place in places.items():
                rest = name.removeprefix(f"{inside}/")
                if rest != name and rest.split("/")[0] not in LEFT_OUT:
                    member.name = f"{place}/{rest}"
                    tar.extract(member, target)


def compile_sources(sources: Path, tools: Path, definitions: dict[str, str], about: dict[str, Any]) -> Path:
    """Return the folder of the compiled programs from the cache, or compile them."""
    key = hashlib.sha256(json.dumps([sources.name, definitions, about], sort_keys=True).encode()).hexdigest()[:16]
    target = cache() / f"llama.cpp-{key}"
    with lock(target):
        if not (target / "ready").exists():
            environment = os.environ | {"NINJA_STATUS": STATUS, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
            settings = [f"-D{name}={value}" for name, value in definitions.items()]
            call(["cmake", "-G", "Ninja", "-S", sources / "source", "-B", target / "build", *settings], environment)
            jobs = cpu.available_threads()
            call(["cmake", "--build", target / "build", "--parallel", jobs, "--target", *TARGETS], environment)
            (target / "ready").touch()
    return target / "build"


def call(command: list[Any], environment: dict[str, str]) -> None:
    """Run a step of the compilation; its output goes to the log. Raises `UserError` if it fails."""
    program = shutil.which(command[0], path=environment["PATH"])
    if not program:
        raise UserError(f"{command[0]} is missing; it belongs to envs/llama_cpp: name its bin with --tools")
    if status := run_compiler([program, *command[1:]], environment):
        raise UserError(
            f"llama.cpp did not compile ({' '.join(map(str, command[:2]))}: exit code {status}); "
            "its messages are above in the log"
        )


def own_build(build: Path, sources: Path) -> tuple[Path, dict[str, str]]:
    """Return the sources and the flags of the user's build. Raises `UserError` if the binding does not fit it."""
    record = build / "CMakeCache.txt"
    if not record.exists() or not (build / "bin/llama-quantize").exists():
        raise UserError(
            f"{build}: is not a finished build of llama.cpp (CMakeCache.txt, bin/llama-quantize); build it, or leave "
            "llama_cpp out"
        )
    lines = dict(re.findall(r"^(\w+):\w+=(.*)$", record.read_text(encoding="utf-8"), re.MULTILINE))
    source = Path(lines["CMAKE_HOME_DIRECTORY"])
    header = source / "include/llama.h"
    if not header.exists() or header.read_bytes() != (sources / "source/include/llama.h").read_bytes():
        raise UserError(
            f"{build}: its llama.h is not that of {sources.name.rsplit('-', 1)[0]}, for which the Python binding is "
            "made; build that version, or leave llama_cpp out"
        )
    return source, {name: value for name, value in lines.items() if name.startswith(OWN)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--tools", type=Path, default=Path(sys.executable).parent, help="folder of cmake and ninja")
    arguments.add_argument("--build", type=Path, help="an existing build of llama.cpp")
    options = arguments.parse_args()

    sources = fetch_sources(PINS)
    source, about = sources / "source", {}
    if options.build:
        build = options.build.absolute()
        source, definitions = own_build(build, sources)
    else:
        about = {"compiler": compiler(), "machine": platform.machine()}
        definitions = flags(cuda_flags())
        if nvcc := definitions.get("CMAKE_CUDA_COMPILER"):
            said = ask(nvcc, "--version")
            about["nvcc"] = next((line for line in said.splitlines() if "release" in line), said)
        build = compile_sources(sources, options.tools.absolute(), definitions, about)
    used = [name for name in INSTRUCTION_SETS if definitions.get(f"GGML_{name}") == "ON"]
    content = {
        "sources": sources.name,
        "own": bool(options.build),
        "flags": definitions,
        "instruction_sets": used,
    } | about
    with write_atomically(options.dst) as folder:
        folder.mkdir()
        for name, place in (("bin", build / "bin"), ("source", source), ("binding", sources / "binding")):
            (folder / name).symlink_to(place)
        (folder / manifest.NAME).write_text(json.dumps(content, indent=2), encoding="utf-8")
