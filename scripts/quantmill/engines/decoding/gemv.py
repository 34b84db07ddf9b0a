"""AWQ's GEMV kernel for one position in 4-bit layers, as gptqmodel compiles it: one warp per output, float32 sums.

Marlin divides a small matrix among all multiprocessors, which then add their parts one after another: on an H200 that
takes longer than the product (docs/PERFORMANCE.md). More positions and larger matrices stay with Marlin.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from gptqmodel.utils import awq
from safetensors import safe_open
from torch import nn

from quantmill.checkpoint import shards
from quantmill.engines.decoding.merged import Merged

WEIGHTS = 2**24  # matrices with fewer: there the kernel is faster than Marlin on an H200
GROUP_SIZES = (64, 128)  # that the kernel supports
PARTS = ("qweight", "qzeros", "scales")
PACKED = 8  # four-bit numbers per word
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of eight columns in an AWQ word (autoawq, version gemm)
OVERREAD = 128  # words: a warp reads 1,024 inputs at a time, also beyond the last row's end, and ignores those

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _unpack(words: torch.Tensor, dim: int, order: Iterable[int] = range(PACKED)) -> torch.Tensor:
    """Unpack int32 `words` along `dim` (0 or 1) to numbers of 0 to 15, in the places that `order` gives."""
    places = torch.tensor([4 * place for place in order], dtype=torch.int32, device=words.device)
    if dim:
        return ((words[:, :, None] >> places) & 15).flatten(1)
    return ((words[:, None, :] >> places[:, None]) & 15).flatten(0, 1)


def _pack(numbers: torch.Tensor) -> torch.Tensor:
    """Pack eight numbers of 0 to 15 along the last dimension into int32 words, the first in the lowest bits."""
    shifted = numbers.unflatten(-1, (-1, PACKED)).long() << torch.arange(0, 32, 4, device=numbers.device)
    return shifted.sum(-1).to(torch.int32)  # wraps: the highest of four bits is the sign


def unpack_layer(method: str, tensors: Mapping[str, torch.Tensor]) -> Words:
    """Return a layer's numbers [inputs, outputs], zero points and scales [groups, outputs].

    `method` is `gptq` (zero points stored less one, no activation order) or `awq` (version gemm); `tensors` are the
    artifact's qweight, qzeros and scales.
    """
    words, zeros, scales = (tensors[part] for part in PARTS)
    if method == "gptq":
        return _unpack(words, 0), _unpack(zeros, 1) + 1, scales
    return _unpack(words, 1, AWQ_ORDER), _unpack(zeros, 1, AWQ_ORDER), scales


def layout(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Words:
    """Return the kernel's words [outputs, inputs / 8], zero points [outputs, n] and scales [outputs, 8 n], float16.

    Arguments are as `unpack_layer` returns them. A row of zero points has as many words as the kernel reads at a time.
    """
    inputs, outputs = numbers.shape
    words = torch.zeros(outputs * inputs // PACKED + OVERREAD, dtype=torch.int32, device=numbers.device)
    rows = words[: outputs * inputs // PACKED].view(outputs, inputs // PACKED)
    rows.copy_(_pack(numbers.t()))
    taken = 1024 * len(zeros) // inputs  # groups at a time, 8 or 16
    missing = (0, -len(zeros) % taken)
    padded = (nn.functional.pad(each.t(), missing) for each in (zeros, scales.half()))
    return rows, _pack(next(padded)), next(padded).contiguous()


class Gemv(nn.Module):
    """A layer that uses the kernel for one position, and the wrapped layer for more."""

    def __init__(self, layer: nn.Module, words: Words, bias: torch.Tensor | None, group_size: int) -> None:
        super().__init__()
        self.layer, self.group_size = layer, group_size
        for name, tensor in (*zip(("words", "zeros", "steps"), words, strict=True), ("offset", bias)):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() != x.shape[-1] or x.dtype != torch.float16:
            return self.layer(x)
        output = awq.awq_gemv_forward(x.reshape(1, -1), self.words, self.steps, self.zeros, self.group_size)
        return (output if self.offset is None else output + self.offset).view(*x.shape[:-1], -1)


def _layers(model: nn.Module, kind: type[nn.Module]) -> Iterator[tuple[nn.Module, str, list[str]]]:
    """Yield the layers of `kind` for which the kernel works and is faster: each one's parent, attribute, and names in
    the artifact."""
    for path, module in list(model.named_modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is not kind or layer.in_features % 32 or layer.out_features % 4:
                continue
            if layer.in_features * layer.out_features < WEIGHTS:
                yield module, name, module.names if isinstance(module, Merged) else [f"{path}.{name}" if path else name]


def add(model: nn.Module, kind: type[nn.Module], artifact: Path, quantization: dict) -> int:
    """Wrap the layers of `kind` that fit, merged or not. Returns their number: 0 where the kernel cannot be compiled.

    `quantization` is that of `artifact`'s config.json. The kernel reads a second copy of these layers' weights, made
    from the artifact: Marlin has rearranged its own.
    """
    layers, group_size = list(_layers(model, kind)), quantization["group_size"]
    known = quantization["bits"] == 4 and group_size in GROUP_SIZES
    if not known or not layers or not awq.awq_runtime_available():
        return 0
    files = {name: tensor.path for name, tensor in shards.find(artifact).tensors().items()}
    device = str(next(model.parameters()).device)

    def load_tensor(name: str) -> torch.Tensor:
        with safe_open(files[name], framework="pt", device=device) as file:
            return file.get_tensor(name)

    layers = [layer for layer in layers if files.keys() >= {f"{name}.qweight" for name in layer[2]}]
    for holder, attribute, names in layers:
        parts = [
            unpack_layer(quantization["quant_method"], {part: load_tensor(f"{name}.{part}") for part in PARTS})
            for name in names
        ]
        words = layout(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))
        biases = [load_tensor(f"{name}.bias").half() for name in names if f"{name}.bias" in files]
        layer = getattr(holder, attribute)
        setattr(holder, attribute, Gemv(layer, words, torch.cat(biases) if biases else None, group_size))
    return len(layers)
