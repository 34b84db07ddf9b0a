"""Let the GPU's model run on a CPU: its kernels' own sources, compiled for the processor."""

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm.script.ir_builder import tirx as T

from quantmill.mlc import cuda_kernel

TYPES = {"float16": "half", "float32": "float", "int32": "int", "uint32": "unsigned"}


class Kernels:
    """Stands in for `mlc.cuda_kernel.launch`, and compiles what was asked for."""

    def __init__(self, warpgroups: bool = False) -> None:
        self.warpgroups = warpgroups  # as on a GPU that has instructions for them
        self.functions: dict[str, tuple[str, list[str], int]] = {}  # symbol -> call, types, bytes shared
        self.sources: dict[str, None] = {}
        cuda_kernel.launch = self.launch
        cuda_kernel.LAUNCH = None

    def launch(
        self, function: str, source: str, arguments: Sequence[Any], grid: Any, threads: int, shared: int
    ) -> None:
        """Emit a call of the function's stand-in."""
        types = []
        for argument in arguments:
            kind = str(argument.ty.element_type.dtype) if hasattr(argument.ty, "element_type") else None
            types.append(f"{TYPES[kind]}*" if kind else "int")
        symbol = f"on_cpu_{id(self)}_{len(self.functions)}"
        self.functions[symbol] = function, types, shared
        self.sources[source] = None
        T.evaluate(T.call_extern("int32", symbol, *arguments, T.Cast("int32", grid), T.int32(threads)))

    def load(self, folder: Path) -> None:
        """Compile all that was asked for, and make it known to TVM's loader."""
        header = Path(__file__).with_name("cuda_on_cpu.h")
        lines = [f"#define MLC_WARPGROUPS {int(self.warpgroups)}", f'#include "{header}"', "namespace {"]
        lines += [cuda_kernel.include_guard("MLC_KERNEL", cuda_kernel.SOURCE), *self.sources, "}"]
        for symbol, (function, types, shared) in self.functions.items():
            names = [f"a{number}" for number in range(len(types))]
            declared = ", ".join(f"{kind} {name}" for kind, name in zip(types, names, strict=True))
            given = [*names, "shared"] if shared else names
            lines.append(
                f'extern "C" __attribute__((visibility("default"))) int {symbol}({declared}, int grid, int threads) {{'
                f" unsigned char* shared = shared_bytes({shared});"
                f" run_blocks(grid, threads, [&] {{ {function}({', '.join(given)}); }}); return 0; }}"
            )
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text("\n".join(lines))
        options = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-mf16c", "-shared", "-fPIC", "-fno-strict-aliasing"]
        options += ["-fvisibility=hidden"]  # each library's threads are its own
        subprocess.run(["g++", *options, source, "-o", library], check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
