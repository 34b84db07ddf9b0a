"""Compile the library that runs a model in MLC's q4f16_1: one for each architecture and processor, for any weights.

    python scripts/quantmill mlc.compile MODEL OUT.so [--device auto] [--cache FOLDER]

MODEL is a folder with a model's config.json, or that file. A library in the cache is used again if architecture,
target, TVM and the definition of the model (scripts/quantmill/mlc) are the same.
"""

import os
import shutil
from pathlib import Path

from quantmill import devices
from quantmill.checkpoint import shards
from quantmill.common.atomic import work_folder, write_atomically
from quantmill.common.program import parser
from quantmill.mlc import architecture, library, source_config


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", type=Path, help="folder of a model, or its config.json")
    arguments.add_argument("out", type=Path, help="library to write")
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda")
    arguments.add_argument("--arch", help="compile for this GPU, such as sm_90; it need not be here")
    arguments.add_argument("--cache", type=Path, help="folder of compiled libraries")
    options = arguments.parse_args()

    path = options.model / "config.json" if options.model.is_dir() else options.model
    shape = architecture.of(source_config.read(shards.read_json(path), path), path)
    device = "cuda" if options.arch else devices.resolve(options.device, hold=False)
    target = library.cuda_target(options.arch) if device == "cuda" else library.cpu_target()
    cached = options.cache and options.cache / f"{library.key(shape, target)}.so"
    with write_atomically(options.out) as partial, work_folder(options.out):
        if cached and cached.is_file():
            shutil.copyfile(cached, partial)  # not a link: Snakemake sets the times of its outputs
            return
        library.compile(shape, target, partial)
        if cached:
            cached.parent.mkdir(parents=True, exist_ok=True)
            beside = cached.with_name(f".{cached.name}.{os.getpid()}")  # other jobs may write it too
            shutil.copyfile(partial, beside)
            beside.replace(cached)
