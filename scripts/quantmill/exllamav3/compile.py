"""Compile ExLlamaV3's kernels for this machine's GPUs, once.

    python scripts/quantmill exllamav3.compile DST [--threads 16]

Run it in envs/exllamav3. The library compiles itself, with nvcc: some two hours of one core. The result is kept in the
user's cache folder (~/.cache/quantmill) by the versions of the library, torch and nvcc and the GPUs' architectures, so
that checkouts share it. An interrupted compilation resumes. DST holds a link to the result.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from quantmill.common import manifest
from quantmill.common.atomic import write_atomically
from quantmill.common.cache_folder import cache, lock
from quantmill.common.program import UserError, parser, run_compiler
from quantmill.devices import cpu
from quantmill.exllamav3 import MODULE

CUDA = "/usr/local/cuda"  # where nvcc is installed, even if it is not on PATH


def architectures() -> str:
    """Return the architectures of the visible GPUs, in torch's words. Raises `UserError` if there is none."""
    found = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
    if not found:
        raise UserError(f"exl3: torch {torch.__version__} sees no GPU here to compile the kernels for")
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found))


def cuda_home() -> Path:
    """Find the toolkit of nvcc. Raises `UserError` if there is none."""
    compiler = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), CUDA, compiler and Path(compiler).resolve().parents[1]]
    found = next((Path(place) for place in places if place and (Path(place) / "bin/nvcc").exists()), None)
    if not found:
        raise UserError("exl3: its kernels are compiled here, and there is no nvcc; install the CUDA toolkit")
    return found


def nvcc_release(home: Path) -> str:
    """Return nvcc's release, such as 13.0."""
    said = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release ([\d.]+)", said)
    return match[1] if match else said


def compile_kernels(about: dict[str, str], home: Path, threads: int) -> Path:
    """Return the compiled module from the cache, or compile it. Raises `UserError` if that fails."""
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    target = cache() / f"exllamav3-{about['exllamav3']}-{key}"
    with lock(target):
        if not (target / "ready").exists() or not find(target):
            (target / MODULE / "lock").unlink(missing_ok=True)  # torch's, which a killed build leaves
            paths = f"{Path(sys.executable).parent}{os.pathsep}{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
            environment = os.environ | {
                "TORCH_EXTENSIONS_DIR": str(target),
                "TORCH_CUDA_ARCH_LIST": about["architectures"],
                "MAX_JOBS": str(threads),
                "CUDA_HOME": str(home),
                "PATH": paths,  # of ninja, too
            }
            status = run_compiler([sys.executable, "-P", "-c", "import exllamav3.ext"], environment)
            if status or not find(target):
                raise UserError(
                    f"exl3: the kernels of exllamav3 {about['exllamav3']} did not compile (exit code "
                    f"{status}); the compiler's messages are above in the log"
                )
            (target / "ready").touch()
    return find(target)[0]


def find(target: Path) -> list[Path]:
    """List the modules that torch built in a folder: one or none."""
    return list((target / MODULE).glob(f"{MODULE}*.so"))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument(
        "--threads", type=cpu.limit_threads, default=cpu.available_threads(), help="files that are compiled at once"
    )
    options = arguments.parse_args()

    home = cuda_home()
    about = {
        "exllamav3": version("exllamav3"),
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "nvcc": nvcc_release(home),
        "architectures": architectures(),
    }
    module = compile_kernels(about, home, options.threads)
    with write_atomically(options.dst) as folder:
        folder.mkdir()
        (folder / module.name).symlink_to(module)
        (folder / manifest.NAME).write_text(json.dumps(about, indent=2), encoding="utf-8")
