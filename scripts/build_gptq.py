#!/usr/bin/env python3
"""Quantize a model to GPTQ with gptqmodel, the maintained successor of AutoGPTQ, whose files AutoGPTQ reads as well.

    python scripts/build_gptq.py SRC DST --calibration calibration.json --evaluation evaluation.json [--bits 4]
        [--group-size auto] [--sym true] [--desc-act false] [--damp-percent 0.05]

SRC is the fp16 artifact. The same input gives the same bytes on the same kind of CPU with as many threads.
"""

import os
from importlib.metadata import version

import torch
from transformers import GenerationConfig

from common.program import run
from quantization.program import GPTQ, Job, build, gptq_parser

RESUMABLE = ("llama", "qwen3_moe")  # gptqmodel.looper.gptq_checkpoint.validate_checkpoint_support


def quantize(job: Job) -> None:
    """Call gptqmodel. It starts CUDA when it is imported: not before this job holds a GPU."""
    # Read at import: its own guess is wrong on machines with two cores; no kernel sources may come from the network
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    os.environ.setdefault("GPTQMODEL_OFFLINE", "1")
    import gptqmodel
    from gptqmodel.looper import loop_processor
    from gptqmodel.looper.checkpoint import CheckpointStopped
    from gptqmodel.looper.checkpoint_store import CheckpointConfig

    loop_processor._PROJECT_LOG_DIR = job.saved / "logs"  # its own choice is a folder where the user happens to be
    config = gptqmodel.QuantizeConfig(
        **job.parameters, device=job.device, offload_to_disk=True, offload_to_disk_path=str(job.saved / "offload")
    )
    model = gptqmodel.GPTQModel.load(str(job.src), config, dtype=job.dtype)
    samples = [torch.tensor([ids]) for ids in job.calibration.samples]
    # which card it is may change; what matters of it names the folder (quantization.program)
    # it hashes all that was saved at every save: with 7B on a GPU most of the time
    interval = "layer:1" if job.device == "cpu" else "layer:8"
    progress = CheckpointConfig(path=job.resume, strict_device_check=False, interval=interval)
    resume = progress if model.model.config.model_type in RESUMABLE else None
    inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in samples]
    try:
        model.quantize(inputs, batch_size=1, checkpoint=resume)
    except CheckpointStopped:  # it was told to stop, and has saved its progress
        raise KeyboardInterrupt from None
    model.model.generation_config = GenerationConfig()  # the source's own is carried over; some are refused here
    config = model.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if any(
        isinstance(value, dict) for value in rope.values()
    ):  # gptqmodel puts a rope_type beside those of each kind of
        # layer, which transformers then refuses to save
        config.rope_parameters = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    model.save(str(job.saved))


def main() -> None:
    options = gptq_parser(__doc__).parse_args()

    build(
        options,
        quantize,
        format="gptq-int4",
        engine="gptqmodel",
        tool="gptqmodel",
        tool_version=version("gptqmodel"),
        parameters={name: getattr(options, name) for name in GPTQ},
        group_size="group_size",
    )


if __name__ == "__main__":
    run(main)
