"""Layers that read the same input, as one matrix product: a launch takes longer than reading a further layer's
weights."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
TILE = 64  # columns that Marlin permutes among themselves: whole tiles can be joined


class Part(nn.Module):
    """One of the merged layers. The first one that is called with an input calculates all of them."""

    def __init__(self, merged: "Merged", number: int) -> None:
        super().__init__()
        self.merged, self.number = merged, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged.output(x, self.number)


class Merged(nn.Module):
    """A layer whose outputs are those of several layers one after the other; `names` are theirs in the model."""

    def __init__(self, layer: nn.Module, sizes: list[int], names: list[str]) -> None:
        super().__init__()
        self.layer, self.sizes, self.names = layer, sizes, names
        self.input: torch.Tensor | None = None
        self.outputs: dict[int, torch.Tensor] = {}

    def output(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return output `number` for `x`; nothing is kept once all outputs were taken."""
        if self.input is not x or number not in self.outputs:
            self.input, self.outputs = x, dict(enumerate(self.layer(x).split(self.sizes, -1)))
        output = self.outputs.pop(number)
        if not self.outputs:
            self.input = None
        return output


def _join_rows(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Join torch's own layers into one with all their rows."""
    joined = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([layer.weight.data for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([layer.bias.data for layer in layers]), requires_grad=False)
    return joined


def _join_columns(layers: Sequence[nn.Module]) -> nn.Module:
    """Join layers of gptqmodel's Marlin classes, already repacked for the kernel, into one with all their columns."""
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
    """Merge the layers that read the same input in every block of `model`, where all of them are of `kind`.

    `kind` is nn.Linear or one of gptqmodel's Marlin classes. Of the latter only whole tiles are merged, and no layer
    that was padded for the kernel. One group at a time is in memory twice.
    """
    join, tile = (_join_rows, 1) if kind is nn.Linear else (_join_columns, TILE)
    found = [
        (path, block, names)
        for path, block in model.named_modules()
        for names in GROUPS
        if all(type(getattr(block, name, None)) is kind for name in names)
    ]
    for path, block, names in found:
        layers = [getattr(block, name) for name in names]
        if any(layer.out_features % tile or getattr(layer, "_marlin_tile_padding", None) for layer in layers):
            continue
        if len({layer.bias is None for layer in layers}) > 1 or len({layer.in_features for layer in layers}) > 1:
            continue
        full = [f"{path}.{name}" if path else name for name in names]
        merged = Merged(join(layers), [layer.out_features for layer in layers], full)
        for number, name in enumerate(names):
            setattr(block, name, Part(merged, number))
