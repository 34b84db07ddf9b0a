"""The layers that are quantized, and the group sizes that fit them."""

from collections.abc import Mapping
from pathlib import Path

from quantmill.build.quantizer import GROUP_SIZES
from quantmill.checkpoint import reads_more_than_text
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError


def linear_layers(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Map names to (outputs, inputs) of the matrices in the model's numbered blocks, which GPTQ and AWQ quantize."""
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and name.endswith(".weight") and any(part.isdigit() for part in name.split("."))
        if not reads_more_than_text(name)  # no tool quantizes these
    }


def group_size(asked: str, layers: Mapping[str, tuple[int, int]], folder: Path) -> int:
    """Return the group size that `asked` (a number, or `auto` for the largest that fits) means for these layers.

    Raises `UserError` if it does not divide every layer's inputs, with those layers and the sizes that fit.
    """
    if asked != "auto" and (not asked.isdigit() or not int(asked)):
        raise UserError(f"group_size {asked}: a number of weights that share a scale, or auto")
    if not layers:
        raise UserError(f"{folder}: has no layers to quantize: no matrices inside numbered blocks")
    fitting = [size for size in GROUP_SIZES if all(inputs % size == 0 for _, inputs in layers.values())]
    if asked == "auto" and fitting:
        return fitting[0]
    unfit = [f"{name} ({inputs})" for name, (_, inputs) in layers.items() if asked == "auto" or inputs % int(asked)]
    if unfit:
        fit = ", ".join(map(str, fitting)) or "none of " + ", ".join(map(str, GROUP_SIZES))
        raise UserError(
            f"{folder}: group_size {asked} does not divide the inputs of {len(unfit)} of {len(layers)} layers "
            f"({', '.join(unfit[:3])}); sizes that fit: {fit}"
        )
    return int(asked)
