"""Quantize a model to GPTQ with auto-gptq 0.7.1, which some still run; build.gptq uses its successor.

    python scripts/quantmill build.autogptq SRC DST --calibration calibration.json --evaluation evaluation.json
        --parameters '{"bits": 4, "group_size": "auto", "sym": true, "desc_act": false, "damp_percent": 0.05}'

SRC is the fp16 artifact. The same input gives the same bytes on the same kind of CPU with as many threads. With
--sym true gptqmodel reads the result too.
"""

import auto_gptq
import torch
from auto_gptq.modeling import _base
from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP
from auto_gptq.quantization import gptq
from transformers import AutoModelForCausalLM

from quantmill.build.quantizer.placement import AUTOGPTQ
from quantmill.build.quantizer.program import GPTQ, BuildTask, Tool
from quantmill.common.program import UserError


class Quantizer(gptq.Quantizer):
    """Quantizer of auto-gptq that avoids an error of its packing.

    Zero points are stored less one. If sym is false, a group without a clearly negative weight has the zero point 0.
    Its stored value silently spills into the zero points of the next outputs in the same word. Such a group gets the
    zero point 1, and a scale wide enough for the same largest weight.
    """

    def find_params(self, x: torch.Tensor, weight: bool = False) -> None:
        super().find_params(x, weight)
        low = self.zero < 1
        self.scale[low] *= self.maxq / (self.maxq - 1)
        self.zero[low] = 1


def quantize(task: BuildTask) -> None:
    """Call auto-gptq. transformers loads the model, because auto-gptq's loader of float models needs CUDA."""
    gptq.Quantizer = Quantizer
    if task.device == "cpu":
        _base.CUDA_0 = torch.device("cpu")
        torch.cuda.synchronize = lambda: None
    model = AutoModelForCausalLM.from_pretrained(task.src, torch_dtype=task.dtype)
    kind = GPTQ_CAUSAL_LM_MODEL_MAP.get(model.config.model_type)
    if kind is None:
        known = ", ".join(sorted(GPTQ_CAUSAL_LM_MODEL_MAP))
        raise UserError(f"it is of type {model.config.model_type}, and auto-gptq knows only {known}")
    config = auto_gptq.BaseQuantizeConfig(**task.parameters, model_file_base_name="model")
    quantized = kind(model.eval(), False, config)
    quantized.quantize(task.sample_inputs(), cache_examples_on_gpu=task.gpu.placement.activations == "gpu")
    quantized.save_quantized(str(task.saved))


main = Tool("auto-gptq", quantize, parameters=GPTQ, group_size="group_size", placements=AUTOGPTQ).build
