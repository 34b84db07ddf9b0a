"""gptqmodel as a quantizer: what its GPTQ and its AWQ share."""

import os
from types import ModuleType
from typing import Any

from transformers import GenerationConfig

from quantmill.build.quantizer.program import BuildTask


def load_gptqmodel(task: BuildTask) -> ModuleType:
    """Import gptqmodel. It starts CUDA then: not before this job holds a GPU."""
    # Read at import: its own guess is wrong on machines with two cores; no kernel sources may come from the network
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    os.environ.setdefault("GPTQMODEL_OFFLINE", "1")
    import gptqmodel
    from gptqmodel.looper import loop_processor
    from gptqmodel.utils import threadx

    # an error in one of its threads ends the whole process at once; it is handed to who waits for the thread as well
    threadx._DeviceWorker._abort_process = lambda worker, error: None
    loop_processor._PROJECT_LOG_DIR = task.saved / "logs"  # its own choice is a folder where the user happens to be
    return gptqmodel


def save_gptqmodel(model: Any, task: BuildTask) -> None:
    """Save what gptqmodel has quantized."""
    model.model.generation_config = GenerationConfig()  # the source's own is carried over; some are refused here
    config = model.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        # it puts a rope_type beside those of each kind of layer, which transformers then refuses to save
        config.rope_parameters = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    model.save(str(task.saved))
