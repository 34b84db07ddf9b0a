#!/usr/bin/env python3
"""Run one of Quantmill's quantizers with its steps timed, in the environment of its tool: for quantizers_large.py.

    python benchmarks/timed_build.py STEPS.json build.gptq ARGUMENTS…

STEPS.json gets seconds, also if it fails. `steps` are those of the main thread, each without the steps inside it;
together they are the process. `regions` are gptqmodel's own, of all threads: packing (`submodule_finalize`) overlaps
with the next layers. A region ends when its kernels are launched; with CUDA_LAUNCH_BLOCKING=1 when they are done.

FORCED_PLACEMENT=1 takes the tool's second placement, whatever fits, and NO_RESUME=1 saves no progress of gptqmodel.
"""

import contextlib
import functools
import importlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

PACKAGES = ("torch", "transformers", "gptqmodel", "llmcompressor", "compressed-tensors", "auto-round", "triton")


class Clock:
    """Seconds of the main thread in named steps, each without the steps inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside = [0.0]

    @contextlib.contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Count the block as one step."""
        started = time.monotonic()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = time.monotonic() - started
            self.seconds[label] += took - self._inside.pop()
            self._inside[-1] += took

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Replace a function by one that is a step where the main thread calls it."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*arguments: Any, **words: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return original(*arguments, **words)
            with self.step(label):
                return original(*arguments, **words)

        if isinstance(owner, type):
            setattr(owner, name, timed)
        else:
            vars(owner)[name] = timed  # also of a frozen one


def gpu_name() -> str | None:
    """Return the first GPU's name."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def time_gptq(module: Any, clock: Clock, found: dict[str, Any]) -> None:
    """Time gptqmodel: its own regions, its saved progress, and whether its CUDA update of a block is used."""
    clock.wrap(module, "load_gptqmodel", "import")
    clock.wrap(module, "save_gptqmodel", "save by the tool")
    load, save = module.load_gptqmodel, module.save_gptqmodel

    def loaded(task: Any) -> Any:
        gptqmodel = load(task)
        from gptqmodel.looper import gptq_checkpoint
        from gptqmodel.looper.checkpoint import CheckpointExtension
        from gptqmodel.looper.extension import LoopBoundary
        from gptqmodel.quantization import gptq_cuda

        if task.device == "cuda":
            with clock.step("load or compile the CUDA update of a block"):
                found["fused_update"] = gptq_cuda.block_update_available()
        clock.wrap(gptqmodel.GPTQModel, "load", "load the model")
        clock.wrap(gptq_checkpoint, "_source_identity", "progress: hash the source")
        clock.wrap(CheckpointExtension, "prepare", "progress: begin")
        clock.wrap(CheckpointExtension, "on_boundary", "progress: save")
        clock.wrap(LoopBoundary, "quiesce", "progress: wait for packing")
        return gptqmodel

    def saved(model: Any, task: Any) -> None:
        found["regions"] = {
            region: {"seconds": round(each["total"], 2), "count": each["count"]}
            for region, each in model.quant_region_timer.snapshot().items()
            if each["count"]
        }
        save(model, task)

    module.load_gptqmodel, module.save_gptqmodel = loaded, saved
    if "NO_RESUME" in os.environ:
        module.RESUMABLE = ()


def main() -> None:
    clock, found = Clock(), {}
    started = time.monotonic()
    steps_file, name = Path(sys.argv.pop(1)), sys.argv.pop(1)
    sys.argv[0] = name
    with clock.step("import"):
        from quantmill.build.quantizer import gpu_memory, program
        from quantmill.common import manifest
        from quantmill.common.program import run

        module = importlib.import_module(f"quantmill.{name}")
    clock.wrap(manifest, "read_checked", "hash the source")
    clock.wrap(program, "write_artifact", "write and hash the artifact")
    clock.wrap(module.main.__self__, "quantize", "quantize")
    if forced := os.environ.get("FORCED_PLACEMENT"):
        prepare = gpu_memory.prepare
        gpu_memory.prepare = lambda tool, ladder, *rest: prepare(tool, [ladder[int(forced)]], *rest)
    if name == "build.gptq":
        time_gptq(module, clock, found)
    else:
        clock.wrap(module.AutoModelForCausalLM, "from_pretrained", "load the model")
    try:
        run(module.main)
    finally:
        versions = {}
        for package in PACKAGES:
            with contextlib.suppress(PackageNotFoundError):
                versions[package] = version(package)
        process = time.monotonic() - started
        steps = {**clock.seconds, "rest": process - sum(clock.seconds.values()), "process": process}
        steps = {label: round(seconds, 2) for label, seconds in steps.items()}
        content = {"steps": steps, "versions": versions, "gpu": gpu_name(), **found}
        steps_file.write_text(json.dumps(content), encoding="utf-8")


main()
