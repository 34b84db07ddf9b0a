"""bitsandbytes' layers in transformers' model: nf4, fp4 and LLM.int8()."""

import logging
from pathlib import Path

import torch
from bitsandbytes import nn
from transformers import PreTrainedModel

from quantmill.engines import quantized

# it warns at each int8 product that it rounds to float16 first
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class Engine(quantized.Engine):
    """See `engines.Engine`. Four-bit weights are multiplied in the dtype of the activations, on a CPU with
    AVX512-BF16 in bfloat16; int8 weights by activations that are rounded to int8 too."""

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        model = super()._load(artifact, device)
        for layer in self.layers:
            if isinstance(layer, nn.Linear8bitLt):
                self.compute_type = "int8"
                continue
            layer.compute_dtype, layer.compute_type_is_set = self.dtype, True
            if device == "cpu" and layer.support_avx512bf16_for_cpu:  # it repacks weights for products in bfloat16
                self.compute_type = "bfloat16"
        return model

    def stored_bytes(self, layer: torch.nn.Module) -> int:
        """Return the bytes of a layer's scales, which lie beside its weights."""
        if isinstance(layer, nn.Linear8bitLt):
            scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
            return scales.nbytes
        state = layer.weight.quant_state
        return state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
