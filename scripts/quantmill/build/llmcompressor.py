"""Quantize a model to compressed-tensors with llm-compressor.

    python scripts/quantmill build.llmcompressor SRC DST --calibration calibration.json --evaluation evaluation.json
        --parameters '{"scheme": "W4A16", "group_size": "auto"}'

SRC is the fp16 artifact. W4A16 and W8A8 are rounded by GPTQ; the others to the nearest. W4A16, W8A8 and NVFP4
calibrate. The same input gives the same bytes on the same kind of CPU with as many threads.
"""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from quantmill.build.quantizer import ranks
from quantmill.build.quantizer.experts import are_stacked
from quantmill.build.quantizer.placement import LLM_COMPRESSOR
from quantmill.build.quantizer.program import BuildTask, Tool
from quantmill.checkpoint.tensor import Tensor

ROUNDED = ("W4A16", "W8A8")  # by GPTQ
CALIBRATED = (*ROUNDED, "NVFP4")
IGNORED = ["lm_head"]


def recipe(task: BuildTask) -> GPTQModifier | QuantizationModifier:
    """Return llm-compressor's recipe for the parameters."""
    scheme, size = task.parameters["scheme"], task.parameters.get("group_size")
    if scheme not in ROUNDED:
        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=IGNORED)
    if scheme == "W8A8":
        return GPTQModifier(targets="Linear", scheme=scheme, ignore=IGNORED)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return GPTQModifier(config_groups=groups, ignore=IGNORED)


def quantize(task: BuildTask) -> None:
    """Call llm-compressor, on several GPUs in a process for each.

    Raises `ValueError` for a model that would be quantized and not load, such as gpt-oss.
    """
    if are_stacked(task.src):
        why = "llm-compressor stores experts one by one, and transformers loads this model's only in one tensor"
        raise ValueError(f"{why}; gptq-int4 is a format for it")
    if task.gpu.gpus > 1:
        ranks.run("build.llmcompressor_rank", task)
    else:
        model = AutoModelForCausalLM.from_pretrained(task.src, dtype=task.dtype)
        # what stays on the host gets to the GPU a layer at a time
        compress(task, model.to(task.device) if task.gpu.placement.weights == "gpu" else model)


def compress(task: BuildTask, model: PreTrainedModel) -> None:
    """Quantize and save a model with the samples' ids, one sample at a time.

    Of several processes that torch.distributed connects, each has its share of the samples, and one saves.
    """
    more = {}
    if samples := task.calibration.samples:
        rows = {"input_ids": samples, "attention_mask": [[1] * len(ids) for ids in samples]}
        more = {
            "dataset": Dataset.from_dict(rows),
            "num_calibration_samples": len(samples),
            "max_seq_length": task.calibration.sequence_length,
            "shuffle_calibration_samples": False,
        }
    oneshot(model=model, recipe=recipe(task), **more)
    model.generation_config = GenerationConfig()  # the artifact gets the source's; some are refused here
    model.save_pretrained(task.saved, save_compressed=True)


def cast(tensor: Tensor, parameters: Mapping[str, Any]) -> bool:
    """Keep scales of rows and matrices in float32: they may be smaller than float16's normal numbers."""
    return tensor.dtype == "F32" and (parameters["scheme"] == "W4A16" or "_scale" not in tensor.name)


main = Tool(
    "llmcompressor",
    quantize,
    parameters=("scheme",),
    optional=("group_size",),  # of a scheme that has groups
    group_size="group_size",
    calibrated=lambda parameters: parameters["scheme"] in CALIBRATED,
    cast=cast,
    placements=LLM_COMPRESSOR,
    all_experts=True,  # `moe_calibrate_all_experts`, its default
).build
