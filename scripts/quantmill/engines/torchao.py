"""torchao's weights in transformers' model: int8 and float8, multiplied as float numbers."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from quantmill.checkpoint import shards
from quantmill.engines import quantized
from quantmill.layouts import torchao


class Engine(quantized.Engine):
    """See `engines.Engine`."""

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        model = super()._load(artifact, device)
        for layer in self.layers:
            layer.weight = nn.Parameter(_as_dtype(layer.weight, self.dtype), requires_grad=False)
        return model

    def default_dtype(self, artifact: Path, device: str) -> torch.dtype:
        """Return bfloat16 for int8 on a GPU: torchao scales the sums of its integers last, and those of a real model
        are beyond float16's 65,504."""
        words = shards.read_config(artifact / "config.json").get("quantization_config")
        if device == "cuda" and torchao.INT8 in torchao.types(words):
            return torch.bfloat16
        return super().default_dtype(artifact, device)


def _as_dtype(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a quantized weight that is multiplied in `dtype`. transformers leaves that as the artifact says, and so
    does torchao's own `.to`."""
    names, attributes = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    return type(weight.data).__tensor_unflatten__(inner, {**attributes, "dtype": dtype}, None, None)
