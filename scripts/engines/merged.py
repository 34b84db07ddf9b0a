"""Layers that read the same input as one matrix product: of a 4-bit layer the launch takes longer than its bytes."""

import copy

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
TILE = 64  # columns that Marlin permutes among themselves: whole tiles can stand beside one another


class Part(nn.Module):
    """One of the merged layers. Whichever is called first with an input calculates all of them."""

    def __init__(self, merged: "Merged", number: int) -> None:
        super().__init__()
        self.merged, self.number = merged, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged(x)[self.number]


class Merged(nn.Module):
    """A layer whose outputs are those of several, one after the other."""

    def __init__(self, layer: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.layer, self.sizes = layer, sizes
        self.input: torch.Tensor | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.input is not x:
            self.input, self.outputs = x, self.layer(x).split(self.sizes, -1)
        return self.outputs


def _joined(layers: list[nn.Module]) -> nn.Module:
    """Layers of gptqmodel's Marlin classes, repacked for the kernel already, as one with all their columns."""
    joined = copy.copy(layers[0])
    joined._parameters, joined._buffers = dict(joined._parameters), dict(joined._buffers)
    for name in ("qweight", "scales", "qzeros"):
        parts = [getattr(layer, name).data for layer in layers]
        if parts[0].numel():
            joined._parameters.pop(name, None)
            joined._buffers[name] = torch.cat(parts, dim=-1)
    if layers[0].bias is not None:
        joined._buffers["bias"] = torch.cat([layer.bias for layer in layers])
    joined.out_features = sum(layer.out_features for layer in layers)
    return joined


def merge(model: nn.Module, kind: type[nn.Module]) -> None:
    """Merge what reads the same input in every block of `model`, where all of it is of `kind` and fills whole tiles."""
    for block in list(model.modules()):
        for names in GROUPS:
            layers = [getattr(block, name, None) for name in names]
            if not all(isinstance(layer, kind) and layer.out_features % TILE == 0 for layer in layers):
                continue
            if len({layer.bias is None for layer in layers}) > 1:
                continue
            merged = Merged(_joined(layers), [layer.out_features for layer in layers])
            for number, name in enumerate(names):
                setattr(block, name, Part(merged, number))
