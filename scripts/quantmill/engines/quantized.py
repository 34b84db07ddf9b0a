"""Quantized weights that transformers loads, in the layers or tensors of the library that its config.json names.

This is every engine that is registered with `implementation="quantized"`; its name is that of the library's package. A
subclass says what its library does otherwise.
"""

from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from quantmill.engines import transformers

PLAIN = ("torch", "transformers")  # packages whose layers hold plain weights


class Engine(transformers.Engine):
    """See `engines.Engine`."""

    plain = False

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        model = super()._load(artifact, device)
        self.layers = [each for each in model.modules() if _is_quantized(each)]
        return model

    def stored_bytes(self, layer: torch.nn.Module) -> int:
        """Return the bytes of a layer's quantized weights beyond the `nbytes` of its parameters: scales that lie
        elsewhere, buffers. A tensor that is made of others claims the bytes that it stands for."""
        parameters = sum(_inner_bytes(each) - each.nbytes for each in layer.parameters(recurse=False))
        return parameters + sum(map(_inner_bytes, layer.buffers(recurse=False)))

    def kernel(self) -> str:
        """Return what multiplies: the classes of quantized layers, or of their weights."""
        parts = (layer.weight.data if is_composite(getattr(layer, "weight", None)) else layer for layer in self.layers)
        return " and ".join(sorted({type(each).__name__ for each in parts}))

    def held_bytes(self) -> dict[str, int]:
        return super().held_bytes() | {"quantized layers": sum(map(self.stored_bytes, self.layers))}

    def versions(self) -> dict[str, str]:
        return super().versions() | {self.name: version(self.name), "kernel": self.kernel()}


def is_composite(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is a library's subclass that is made of other tensors."""
    return hasattr(tensor, "__tensor_flatten__")


def _is_quantized(layer: torch.nn.Module) -> bool:
    own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    is_plain = type(layer).__module__.partition(".")[0] in PLAIN
    return any(map(is_composite, own)) or (bool(own) and not is_plain)


def _inner_bytes(tensor: torch.Tensor) -> int:
    if not is_composite(tensor):
        return tensor.nbytes
    return sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])
