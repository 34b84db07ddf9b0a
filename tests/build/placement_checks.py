"""Run by test_placements.py in an environment with tools, on a CPU: each tool with each of its placements.

    python placement_checks.py FOLDER WORK TOOL…

FOLDER is one of tests/helpers/cut_demo.py. Prints JSON: for each tool the SHA-256 of what it saved, by placement; of
llm-compressor also by two processes, twice; and what `gpu_memory.prepare` does with a GPU that torch reports.
"""

import contextlib
import hashlib
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from quantmill.build.quantizer import gpu_memory, placement  # noqa: E402
from quantmill.build.quantizer.calibration import NONE, Calibration  # noqa: E402
from quantmill.build.quantizer.gpu_memory import GpuMemory  # noqa: E402
from quantmill.build.quantizer.program import BuildTask  # noqa: E402
from quantmill.common.program import UserError  # noqa: E402

GPTQ = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "damp_percent": 0.05}
TOOLS: dict[str, tuple[dict[str, Any], tuple[placement.Placement, ...]]] = {
    "gptq": (GPTQ, placement.GPTQMODEL),
    "autogptq": (GPTQ, placement.AUTOGPTQ),
    "llmcompressor": ({"scheme": "W4A16", "group_size": 128}, placement.LLM_COMPRESSOR),
    "autoround": ({"layout": "gptq", "bits": 4, "group_size": 128, "sym": True, "iters": 3}, placement.AUTOROUND),
}
SAMPLES, LENGTH = 10, 96  # more than AutoRound takes at once
GB = 10**9


def quantize(tool: str, folder: Path, out: Path, gpu: GpuMemory) -> str:
    """Call a tool as its program does, and return the SHA-256 of the tensors that it saved."""
    ids = json.loads((folder / "calibration.json").read_text())["ids"]
    samples = [ids[number * LENGTH :][:LENGTH] for number in range(SAMPLES)]
    out.mkdir()
    torch.manual_seed(0)
    calibration = Calibration(samples, LENGTH, "")
    places = folder / "fp16", out, out.with_name(f"{out.name}.resume")
    task = BuildTask(*places, dict(TOOLS[tool][0]), calibration, "cpu", torch.float32, {"tool": tool}, gpu)
    importlib.import_module(f"quantmill.build.{tool}").quantize(task)
    digest = hashlib.sha256()
    for file in sorted(out.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):  # without notes, which may name the folder
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def with_a_gpu(model: Path, free: int, asked: float | None, *ladder: placement.Placement) -> dict[str, Any] | str:
    """Return what a program may use and chooses with a GPU of 80 GB, of which so many bytes are free."""
    options = types.SimpleNamespace(device="cuda", gpus=1, gpu_memory_gb=asked, src=model)
    limits: list[float] = []
    gpu = {
        "device_count": lambda: 1,
        "mem_get_info": lambda number: (free, 80 * GB),
        "get_device_properties": lambda number: types.SimpleNamespace(total_memory=80 * GB),
        "set_per_process_memory_fraction": lambda share, number: limits.append(share),
        "max_memory_reserved": lambda number: 7,
    }
    with mock.patch.multiple(torch.cuda, **gpu):
        try:
            found = gpu_memory.prepare("tool", ladder, options, NONE)  # type: ignore[arg-type] # options of a program
        except UserError as error:
            return str(error)
        errors = [found.explain(text) for text in ("CUDA out of memory. Tried", "KeyError: 'x'")]
        return found.facts() | {"limits": limits, "errors": errors}


folder, work = map(Path, sys.argv[1:3])
torch.set_num_threads(1)
facts: dict[str, Any] = {}
with contextlib.redirect_stdout(sys.stderr):
    for tool in sys.argv[3:]:
        ladder = TOOLS[tool][1]
        alone = [each for each in ladder if each.shared != "layer"]
        facts[tool] = [
            quantize(tool, folder, work / f"{tool}-{number}", GpuMemory(each)) for number, each in enumerate(alone)
        ]
    if "llmcompressor" in sys.argv:
        from quantmill.build.quantizer import ranks

        ranks.program = types.SimpleNamespace(  # type: ignore[assignment] # a rank whose host's memory is not its GPU's
            command=lambda name: [sys.executable, str(Path(__file__).with_name("rank_on_a_cpu.py"))]
        )
        two = GpuMemory(placement.LLM_COMPRESSOR[1], gpus=2)
        facts["ranks"] = [quantize("llmcompressor", folder, work / f"ranks-{number}", two) for number in range(2)]
        task_that_fails = GpuMemory(placement.LLM_COMPRESSOR[1], gpus=2)
        TOOLS["llmcompressor"][0]["scheme"] = "NOPE"
        try:
            quantize("llmcompressor", folder, work / "failed", task_that_fails)
        except RuntimeError as error:
            facts["failed"] = str(error)
    whole, layers = placement.LLM_COMPRESSOR
    facts["gpu"] = {
        "free": with_a_gpu(folder / "fp16", 70 * GB, None, whole, layers),
        "asked": with_a_gpu(folder / "fp16", 70 * GB, 8, whole, layers),
        "little": with_a_gpu(folder / "fp16", 5 * GB, 8, whole, layers),
        "tight": with_a_gpu(folder / "fp16", 70 * GB, 0.31, whole, layers),
        "none": with_a_gpu(folder / "fp16", 70 * GB, 0.001, whole, layers),
        "no choice": with_a_gpu(folder / "fp16", 70 * GB, None),
    }
print(json.dumps(facts))
