"""Quantize a model to HQQ: four bits with a float zero point for each group, without calibration.

    python scripts/quantmill build.hqq SRC DST --parameters '{"nbits": 4, "group_size": 64}'

SRC is the fp16 artifact. The same input gives the same bytes on the same kind of CPU. It is stored as safetensors,
with the quantization_config that vLLM and older versions of transformers read.
"""

import json

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quantmill.build.quantizer.program import BuildTask, Tool, keep_dtype

KEPT = ("lm_head",)  # in float16


def quantize(task: BuildTask) -> None:
    """Call hqq for the linear layers of the blocks, and save the model's weights."""
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(task.src, dtype="auto").to(task.device)
    config = BaseQuantizeConfig(nbits=task.parameters["nbits"], group_size=task.parameters["group_size"], axis=1)
    AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=model.dtype, device=task.device)
    if any(isinstance(model.get_submodule(name), HQQLinear) for name in KEPT):
        raise ValueError(f"hqq quantized {KEPT[0]}")
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file({name: tensor.clone() for name, tensor in state.items()}, task.saved / "model.safetensors")
    plain = json.loads(json.dumps(config, default=lambda value: str(value).removeprefix("torch.")))
    words = {"quant_method": "hqq", "quant_config": plain, "skip_modules": [*KEPT]}
    content = model.config.to_dict() | {"quantization_config": words}
    (task.saved / "config.json").write_text(json.dumps(content, default=str), encoding="utf-8")


main = Tool(
    "hqq",
    quantize,
    parameters=("nbits", "group_size"),
    group_size="group_size",
    calibrated=False,
    cast=keep_dtype,  # loaded as the fp16 artifact stores it
).build
