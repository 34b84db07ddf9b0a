"""Ask llama.cpp how large its cache is, without memory for it.

    python scripts/quantmill llamacpp.cells FILE SETTINGS

SETTINGS is JSON: parameters of a context by llama.cpp's names. llama.cpp reads the header of the GGUF file, makes a
context as it does to find out what fits a device (`no_alloc`), and writes to its log what each cache would take. This
is a program of its own because the library ends its process where an assertion fails.
"""

import ctypes
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

from quantmill import llamacpp
from quantmill.common.program import UserError, command, parser, run_child
from quantmill.metrics.footprint import Layers

PAGE = 256  # tokens to which llama.cpp rounds a context up
FLASH = {"auto": -1, "off": 0, "on": 1}
CELLS, SEQUENCES = 2**16, 64  # many, since the log rounds to a hundredth of a MiB
SWA = re.compile(r"creating +(non-)?SWA KV cache")
SIZE = re.compile(r"llama_(kv_cache|memory_recurrent): size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers")
BATCH = re.compile(r"n_ubatch += (\d+)")


@dataclass(frozen=True)
class Cells:
    """Layers that a context keeps. batch: tokens that it reads at a time, for which a cache of windows has room too."""

    layers: Sequence[Layers]
    batch: int


def read(log: str, window: int) -> Cells:
    """Read llama.cpp's log. `window`: that of the model's layers with a sliding window, if it has any."""
    layers, sliding, batch = [], False, 0
    for line in log.splitlines():
        if found := SWA.search(line):
            sliding = not found[1]
        elif found := BATCH.search(line):
            batch = int(found[1])
        elif found := SIZE.search(line):
            cells, count = int(found[3]), int(found[4])
            of_cell = float(found[2]) * 2**20 / cells
            if found[1] == "memory_recurrent":  # a cell of a user; `count` has layers without a state too
                layers.append(Layers(1, 0.0, state_bytes=of_cell))
            elif count:
                layers.append(Layers(count, of_cell / count, window if sliding else None))
    if not layers:
        raise UserError("llama.cpp's log says nothing of a cache")
    return Cells(layers, batch)


def ask(file: Path, settings: Mapping[str, int]) -> Cells | None:
    """Return what a context with these settings keeps; None if llama.cpp does not say, which the log then shows."""
    found = run_child([*command("llamacpp.cells"), file, json.dumps(settings)], stdout=PIPE)
    if found.returncode:
        sys.stderr.write(found.stderr)
        return None
    said = json.loads(found.stdout)
    return Cells([Layers(**each) for each in said["layers"]], said["batch"])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("file", type=Path)
    arguments.add_argument("settings", type=json.loads)
    options = arguments.parse_args()

    lib, log = llamacpp.binding(), []

    def keep(_: int, text: bytes, __: Any) -> None:
        log.append(text.decode(errors="replace"))

    callback = lib.llama_log_callback(keep)
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model, context = lib.llama_model_default_params(), lib.llama_context_default_params()
    none = (ctypes.c_void_p * 1)()
    model.devices = ctypes.addressof(none)
    model.no_alloc, model.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
    context.n_ctx, context.n_seq_max, context.kv_unified, context.swa_full = CELLS, SEQUENCES, True, False
    for name, value in options.settings.items():
        setattr(context, name, value)
    loaded = lib.llama_model_load_from_file(str(options.file).encode(), model)
    if not loaded or not lib.llama_init_from_model(loaded, context):
        raise UserError(f"{options.file}: llama.cpp cannot make a context ({''.join(log[-2:]).strip()})")
    print(json.dumps(asdict(read("".join(log), lib.llama_model_n_swa(loaded)))))
