"""Loading and saving for both quantizers of gptqmodel, GPTQ and AWQ."""

import os
from types import ModuleType
from typing import Any

import torch
from transformers import GenerationConfig

from quantmill.build.quantizer.program import BuildTask


def load_gptqmodel(task: BuildTask) -> ModuleType:
    """Import gptqmodel. Importing starts CUDA, so it waits until this job holds a GPU."""
    # Read at import. Its guess is wrong on machines with two cores; kernel sources must not come from the network.
    # With a GPU these threads pack finished layers, which takes 200 s of one thread for a 7B (docs/FOOTGUNS.md)
    workers = 2 if task.device == "cpu" else max(2, torch.get_num_threads())
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(workers))
    os.environ.setdefault("GPTQMODEL_OFFLINE", "1")
    import gptqmodel
    from gptqmodel.looper import loop_processor
    from gptqmodel.utils import threadx

    # An error in one of its threads would end the process at once; the waiting thread gets the error as well
    threadx._DeviceWorker._abort_process = lambda worker, error: None
    loop_processor._PROJECT_LOG_DIR = task.saved / "logs"  # else a folder in the current one
    return gptqmodel


def activations_device(task: BuildTask) -> str | None:
    """Return where gptqmodel keeps the samples' activations; None is the GPU that computes them."""
    if task.gpu.placement.activations == "host":
        return "cpu"
    return "balanced" if task.gpu.gpus > 1 else None


def save_gptqmodel(model: Any, task: BuildTask) -> None:
    """Save a model that gptqmodel has quantized."""
    model.model.generation_config = GenerationConfig()  # the artifact gets the source's; some are refused here
    config = model.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        # it adds a rope_type to those of each kind of layer, which transformers then refuses to save
        config.rope_parameters = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    model.save(str(task.saved))
