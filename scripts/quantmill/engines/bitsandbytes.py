"""bitsandbytes' layers in transformers' model: nf4, fp4 and LLM.int8()."""

import logging
from importlib.metadata import version
from pathlib import Path

import torch
from bitsandbytes import nn
from transformers import PreTrainedModel

from quantmill.engines import transformers

# it says at each product of int8 that it rounds to float16 first
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class Engine(transformers.Engine):
    """See `engines.Engine`. Weights of four bits are multiplied in the dtype of the activations, on a CPU with
    AVX512-BF16 in bfloat16; those of int8 by activations that are rounded to int8 too."""

    library = "bitsandbytes"
    plain = False

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        model = super()._load(artifact, device)
        self.layers = [each for each in model.modules() if isinstance(each, nn.Linear4bit | nn.Linear8bitLt)]
        for layer in self.layers:
            if isinstance(layer, nn.Linear8bitLt):
                self.compute_type = "int8"
                continue
            layer.compute_dtype, layer.compute_type_is_set = self.dtype, True
            if device == "cpu" and layer.support_avx512bf16_for_cpu:  # packs weights anew for products in bfloat16
                self.compute_type = "bfloat16"
        return model

    def weight_bytes(self) -> int:
        return super().weight_bytes() + sum(map(_scale_bytes, self.layers))

    def versions(self) -> dict[str, str]:
        kernels = " and ".join(sorted({type(each).__name__ for each in self.layers}))
        return super().versions() | {"bitsandbytes": version("bitsandbytes"), "kernel": kernels}


def _scale_bytes(layer: torch.nn.Module) -> int:
    """Bytes of what a layer's weights are multiplied by, which lies beside them."""
    if isinstance(layer, nn.Linear8bitLt):
        scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
        return scales.nbytes
    state = layer.weight.quant_state
    return state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
