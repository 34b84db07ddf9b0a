"""compressed-tensors in transformers' model: weights are unpacked when they are loaded, and activations rounded as the
format says. Its predictions are the format's. Its speed is that of unpacked weights, which are not deployed."""

from pathlib import Path
from typing import Any

import torch
from transformers import CompressedTensorsConfig, PreTrainedModel

from quantmill.engines import quantized
from quantmill.layouts import compressed_tensors, quantization

BFLOAT16 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")  # the library unpacks these to bfloat16 only


class Engine(quantized.Engine):
    """See `engines.Engine`."""

    def load_options(self, artifact: Path, device: str) -> dict[str, Any]:
        unpacked = CompressedTensorsConfig(run_compressed=False)
        return super().load_options(artifact, device) | {"quantization_config": unpacked}

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        found = compressed_tensors.scheme(quantization(artifact))
        if found["format"] in BFLOAT16:
            self.dtype = torch.bfloat16
        model = super()._load(artifact, device)
        inputs = found.get("input_activations")
        if inputs:  # products round them to this type
            self.compute_type = f"{inputs['type']}{inputs['num_bits']}"
        return model

    def kernel(self) -> str:
        return "unpacked"
