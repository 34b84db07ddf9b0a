"""Quantize a model to GPTQ with gptqmodel, the maintained successor of AutoGPTQ. AutoGPTQ reads its files.

    python scripts/quantmill build.gptq SRC DST --calibration calibration.json --evaluation evaluation.json
        --parameters '{"bits": 4, "group_size": "auto", "sym": true, "desc_act": false, "damp_percent": 0.05}'

SRC is the fp16 artifact. The same input gives the same bytes on the same kind of CPU with as many threads.
"""

from quantmill.build.quantizer.gptqmodel_tool import activations_device, load_gptqmodel, save_gptqmodel
from quantmill.build.quantizer.placement import GPTQMODEL
from quantmill.build.quantizer.program import GPTQ, BuildTask, Tool

RESUMABLE = ("llama", "qwen3_moe")  # gptqmodel.looper.gptq_checkpoint.validate_checkpoint_support


def quantize(task: BuildTask) -> None:
    """Call gptqmodel."""
    gptqmodel = load_gptqmodel(task)
    from gptqmodel.looper.checkpoint import CheckpointStopped
    from gptqmodel.looper.checkpoint_store import CheckpointConfig

    config = gptqmodel.QuantizeConfig(
        **task.parameters,
        device=task.device,
        calibration_data_device=activations_device(task),
        offload_to_disk=True,
        offload_to_disk_path=str(task.saved / "offload"),
    )
    model = gptqmodel.GPTQModel.load(str(task.src), config, dtype=task.dtype)
    # Another GPU may resume: the folder's name has all that matters of it (`resume_folder`). Each save writes the
    # activations of all samples and hashes all saves before: docs/FOOTGUNS.md has the seconds.
    interval = "layer:1" if task.device == "cpu" else "layer:16"
    progress = CheckpointConfig(path=task.resume, strict_device_check=False, interval=interval)
    resume = progress if model.model.config.model_type in RESUMABLE else None
    try:
        model.quantize(task.sample_inputs(), batch_size=1, checkpoint=resume)
    except CheckpointStopped:  # it was interrupted, and has saved its progress
        raise KeyboardInterrupt from None
    save_gptqmodel(model, task)


main = Tool("gptqmodel", quantize, parameters=GPTQ, group_size="group_size", placements=GPTQMODEL).build
