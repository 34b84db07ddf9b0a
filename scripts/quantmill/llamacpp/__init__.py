"""llama.cpp as compiled for this machine: its programs, its converter, its Python binding.

`llamacpp.compile` makes the folder: `bin` with programs and libraries, `source` with llama.cpp's sources, `binding`
with the package `llama_cpp`, and `quantmill.json` with how it was compiled.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import ModuleType
from typing import Any

from quantmill.common import manifest
from quantmill.common.program import UserError, start_child

FOLDER = "artifacts/libraries/llama.cpp"  # where the workflow puts it; QUANTMILL_LLAMA_CPP names another place


def place() -> Path:
    """Return the folder where the compiled llama.cpp belongs."""
    return Path(os.environ.get("QUANTMILL_LLAMA_CPP", FOLDER)).absolute()


def folder() -> Path:
    """Return the folder of the compiled llama.cpp. Raises `UserError` if it is missing."""
    path = place()
    if not (path / manifest.NAME).exists():
        raise UserError(f"{path}: has no llama.cpp; compile it there: python scripts/quantmill llamacpp.compile {path}")
    return path


def build() -> dict[str, Any]:
    """Read how it was compiled: release, commit, flags and instruction sets."""
    return json.loads((folder() / manifest.NAME).read_text(encoding="utf-8"))


def binding() -> ModuleType:
    """Import the binding's low-level module, over the compiled library."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder() / "bin")
    return _import("llama_cpp.llama_cpp", "binding")


def gguf() -> ModuleType:
    """Import llama.cpp's Python package of the format, which has the arithmetic of every type in numpy."""
    return _import("gguf", "source/gguf-py")


def _import(name: str, place: str) -> ModuleType:
    if (path := str(folder() / place)) not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(name)


def call(program: str, *arguments: object, cwd: Path | None = None) -> str:
    """Run one of llama.cpp's programs. Its output goes to the log and is returned.

    Raises `UserError` with its last error line if it fails.
    """
    command = [str(folder() / "bin" / program), *map(str, arguments)]
    lines = []
    with start_child(command, cwd=cwd, text=True, errors="replace", stdout=PIPE, stderr=STDOUT) as process:
        for line in process.stdout or ():
            sys.stderr.write(line)
            lines.append(line.strip())
        process.wait()
    if process.returncode:
        reasons = [line for line in lines if "error" in line.lower() or "failed" in line.lower()] or lines or [""]
        raise UserError(f"llama.cpp's {program} failed ({reasons[-1][:300] or f'exit code {process.returncode}'})")
    return "\n".join(lines)
