"""Quantize a model to AWQ with autoawq, or with gptqmodel where autoawq does not know the architecture, or the model is
a mixture of experts.

    python scripts/quantmill build.awq SRC DST --calibration calibration.json --evaluation evaluation.json
        --parameters '{"tool": "auto", "w_bit": 4, "q_group_size": "auto", "zero_point": true, "version": "GEMM"}'

SRC is the fp16 artifact. The same input gives the same bytes on the same kind of CPU with as many threads.
"""

from importlib.metadata import version
from typing import Any

import torch
from transformers import GenerationConfig

from quantmill.build.quantizer.gptqmodel_tool import load_gptqmodel, save_gptqmodel
from quantmill.build.quantizer.program import BuildTask, Tool
from quantmill.checkpoint import is_mixture, shards
from quantmill.common import tokenizer
from quantmill.common.model_config import of_text


def quantizer() -> type:
    """Return autoawq's quantizer without an error that it has on a CPU.

    Its search for a layer's scales saves the weights with `.cpu()`, which does not copy them on a CPU, and then
    multiplies them in place. So it restores weights scaled by the first guess, and silently returns another model (the
    demo's perplexity is 48.6 instead of 46.55).
    """
    from awq.quantize.quantizer import AwqQuantizer

    class Quantizer(AwqQuantizer):
        def _compute_best_scale(self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *rest: Any) -> Any:
            original = module2inspect.state_dict
            module2inspect.state_dict = lambda: {name: value.clone() for name, value in original().items()}
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest)
            finally:
                del module2inspect.state_dict

    return Quantizer


def quantize(task: BuildTask) -> None:
    """Call the tool, and record its name. Importing a tool starts CUDA, so it waits until this job holds a GPU.

    Raises `ValueError` for models that they would quantize and that would load as other models.
    """
    from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP

    source = shards.find(task.src)
    fused = sorted(name for name in source.tensors() if name.endswith("mlp.gate_up_proj.weight"))
    if fused:
        raise ValueError(f"gptqmodel, which runs the result, splits {fused[0]} wrongly; gptq-int4 is right")
    tool = task.parameters.pop("tool")
    if tool == "auto":
        known = source.config().get("model_type") in AWQ_CAUSAL_LM_MODEL_MAP
        # autoawq wants a module for each expert, and transformers 5 has one for all
        tool = "autoawq" if known and not is_mixture(of_text(source.config())) else "gptqmodel"
    task.facts.update(tool=tool, tool_version=version(tool))
    (by_autoawq if tool == "autoawq" else by_gptqmodel)(task)


def by_autoawq(task: BuildTask) -> None:
    """Quantize and save with autoawq."""
    import awq

    model = awq.AutoAWQForCausalLM.from_pretrained(
        str(task.src), torch_dtype=task.dtype, device_map=task.device, safetensors=True, trust_remote_code=False
    )
    model.quantize(
        tokenizer.for_transformers(task.src),
        quant_config=task.parameters,
        calib_data=task.calibration.samples,
        max_calib_samples=len(task.calibration.samples),
        max_calib_seq_len=task.calibration.sequence_length,
        quantizer_cls=quantizer(),
    )
    model.model.generation_config = GenerationConfig()  # the artifact gets the source's; some are refused here
    model.save_quantized(str(task.saved), safetensors=True)


def by_gptqmodel(task: BuildTask) -> None:
    """Return the same with gptqmodel, whose layers want float16, also on a CPU."""
    gptqmodel = load_gptqmodel(task)
    config = gptqmodel.QuantizeConfig(
        quant_method="awq",
        format="gemm",
        bits=task.parameters["w_bit"],
        group_size=task.parameters["q_group_size"],
        sym=False,
        device=task.device,
        offload_to_disk=True,
        offload_to_disk_path=str(task.saved / "offload"),
    )
    model = gptqmodel.GPTQModel.load(str(task.src), config, dtype=torch.float16)
    model.quantize(task.sample_inputs(), batch_size=1, backend=gptqmodel.BACKEND.AWQ_TORCH)
    save_gptqmodel(model, task)


PARAMETERS = ("tool", "w_bit", "q_group_size", "zero_point", "version")
main = Tool("autoawq", quantize, parameters=PARAMETERS, group_size="q_group_size").build
