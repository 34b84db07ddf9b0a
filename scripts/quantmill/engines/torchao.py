"""torchao's weights in transformers' model: int8 and float8, multiplied as float numbers."""

from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from torchao.utils import TorchAOBaseTensor
from transformers import PreTrainedModel

from quantmill.checkpoint import shards
from quantmill.engines import transformers
from quantmill.layouts import torchao


class Engine(transformers.Engine):
    """See `engines.Engine`."""

    library = "torchao"
    plain = False

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        model = super()._load(artifact, device)
        self.layers = [each for each in model.modules() if isinstance(getattr(each, "weight", None), TorchAOBaseTensor)]
        for layer in self.layers:
            layer.weight = nn.Parameter(_as_dtype(layer.weight, self.dtype), requires_grad=False)
        return model

    def default_dtype(self, artifact: Path, device: str) -> torch.dtype:
        """On a GPU bfloat16 for int8: torchao scales the sums of its integers last, and those of a real model are
        beyond float16's 65,504."""
        words = shards.read_config(artifact / "config.json").get("quantization_config")
        if device == "cuda" and torchao.INT8 in torchao.types(words):
            return torch.bfloat16
        return super().default_dtype(artifact, device)

    def weight_bytes(self) -> int:
        whole = super().weight_bytes()  # counts these as what they are multiplied in
        return whole + sum(_stored_bytes(each.weight) - each.weight.nbytes for each in self.layers)

    def versions(self) -> dict[str, str]:
        kernels = " and ".join(sorted({type(each.weight.data).__name__ for each in self.layers}))
        return super().versions() | {"torchao": version("torchao"), "kernel": kernels}


def _as_dtype(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A quantized weight that is multiplied in `dtype`: transformers leaves that as the artifact says, torchao's own
    `.to` as well."""
    names, attributes = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    return type(weight.data).__tensor_unflatten__(inner, {**attributes, "dtype": dtype}, None, None)


def _stored_bytes(weight: torch.Tensor) -> int:
    return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])
