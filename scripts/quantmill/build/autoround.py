"""Quantize a model with AutoRound, which learns the rounding, and store it as GPTQ or AWQ.

    python scripts/quantmill build.autoround SRC DST --calibration calibration.json --evaluation evaluation.json
        --parameters '{"layout": "gptq", "bits": 4, "group_size": "auto", "sym": true, "iters": 200}'

SRC is the fp16 artifact. The same input gives the same bytes on the same kind of CPU with as many threads.
"""

import torch
from auto_round import AutoRound
from auto_round.algorithms.quantization.sign_round.config import SignRoundConfig
from transformers import AutoModelForCausalLM

from quantmill.build.quantizer.experts import are_stacked
from quantmill.build.quantizer.placement import AUTOROUND
from quantmill.build.quantizer.program import BuildTask, Tool
from quantmill.common import tokenizer

EXPORTS = {"gptq": "auto_gptq", "awq": "auto_awq"}


def quantize(task: BuildTask) -> None:
    """Call AutoRound with the samples' ids. Raises `ValueError` for a model that would load as another one."""
    if are_stacked(task.src):
        why = (
            "AutoRound stores gate and up of each expert, and gptqmodel, which runs the result, expects halves of both"
        )
        raise ValueError(f"{why}; gptq-int4 is a format for it")
    words = dict(task.parameters)
    layout = words.pop("layout")
    samples = [torch.tensor([ids]) for ids in task.calibration.samples]
    step, at_once = (min(placement.batch, len(samples)) for placement in (AUTOROUND[0], task.gpu.placement))
    tool = AutoRound(
        AutoModelForCausalLM.from_pretrained(task.src, dtype=task.dtype),
        tokenizer.for_transformers(task.src),
        alg_configs=SignRoundConfig(**words, gradient_accumulate_steps=step // at_once),
        dataset=samples,
        nsamples=len(samples),
        seqlen=task.calibration.sequence_length,
        batch_size=at_once,
        device_map=",".join(map(str, range(task.gpu.gpus))) if task.gpu.gpus > 1 else task.device,
        low_gpu_mem_usage=task.gpu.placement.activations == "host",
        enable_torch_compile=False,
    )
    tool.quantize_and_save(str(task.saved), format=EXPORTS[layout])
    for file in task.saved.glob("*/*"):  # it makes a folder, named after the source's
        file.rename(task.saved / file.name)


main = Tool(
    "auto-round",
    quantize,
    parameters=("layout", "bits", "group_size", "sym", "iters"),
    group_size="group_size",
    placements=AUTOROUND,
).build
