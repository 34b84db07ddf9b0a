"""Places for a model's weights and its samples' activations while a tool quantizes, and the memory that they take.

A tool has one or more placements, the fastest first. A build takes the first that fits the memory that it may use of
each GPU, and the last if none fits. The figures are coarse. Only a build tells whether it fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quantmill.checkpoint.model_shape import Shape

MB, GB = 10**6, 10**9
FLOAT16 = 2  # bytes a weight, in which tools load a model for a GPU


@dataclass(frozen=True)
class Samples:
    """Calibration samples: their tokens in all, and the tokens of each."""

    tokens: int
    length: int


@dataclass(frozen=True)
class Placement:
    """Places of a tool's weights, and of activations of all samples between two layers.

    weights: `gpu`; or `host` or `disk`, from where one layer at a time gets to the GPU. activations: `gpu` or `host`.
    batch: samples of a step. shared: what several GPUs share, `samples` or a `layer`; without it further GPUs are idle.

    Memory of each GPU: fixed: MB. model: bytes a weight of the model. layer: bytes a weight of a layer's matrices.
    kept: bytes a token of all samples and hidden unit. step: bytes a token of a step and hidden unit. pairs: bytes a
    head and pair of tokens in a sample of a step.

    Memory of the host in addition to the format's figures: host_kept: as `kept`. host_gpu: MB for each further GPU.
    """

    weights: str = "gpu"
    activations: str = "gpu"
    batch: int = 1
    shared: str = ""
    fixed: int = 300
    model: float = 0
    layer: float = 0
    kept: float = 0
    step: float = 0
    pairs: float = 0
    host_kept: float = 0
    host_gpu: int = 0

    def gpus(self, available: int) -> int:
        """Return the number of GPUs that it uses of those available."""
        return available if self.shared else 1

    def gpu_bytes(self, model: Shape, samples: Samples, available: int) -> int:
        """Return the predicted bytes of each GPU."""
        gpus = self.gpus(available)
        layer = self.layer * model.block / (gpus if self.shared == "layer" else 1)
        kept = self.kept * samples.tokens * model.hidden / (gpus if self.shared == "samples" else 1)
        step = self.batch * samples.length * (self.step * model.hidden + self.pairs * model.heads * samples.length)
        return int(self.fixed * MB + self.model * model.parameters + layer + kept + step)

    def least_bytes(self, model: Shape, available: int) -> int:
        """Return the bytes of the weights alone that each GPU holds at once."""
        if self.weights == "gpu":
            return int(self.model * model.parameters)
        return FLOAT16 * model.block // (self.gpus(available) if self.shared == "layer" else 1)

    def host_bytes(self, model: Shape, samples: Samples, available: int) -> int:
        """Return the bytes of the host in addition to the format's figures."""
        more = self.gpus(available) - 1
        return int(self.host_kept * samples.tokens * model.hidden + more * self.host_gpu * MB)

    def __str__(self) -> str:
        where = "the whole model" if self.weights == "gpu" else "a layer at a time"
        return f"{where} on the GPU, activations on the {'GPU' if self.activations == 'gpu' else 'host'}"


def choose(
    placements: Sequence[Placement], model: Shape, samples: Samples, allowed: int | None, available: int
) -> Placement:
    """Return the first placement that fits `allowed` bytes of each GPU (None: any), and the last if none fits."""
    possible = [each for each in placements if each.shared != "layer" or available > 1]
    fits = (each for each in possible if allowed is None or each.gpu_bytes(model, samples, available) <= allowed)
    return next(fits, possible[-1])


WHOLE = Placement()  # of a tool without a choice
# gptqmodel reads a layer at a time from the checkpoint and writes what it packed. Of a layer's largest matrix it holds
# the Hessian, its factor and its inverse in float32, and three copies of the weights
GPTQMODEL = (
    Placement(weights="disk", shared="samples", layer=20, kept=4, step=60),
    Placement(weights="disk", activations="host", shared="samples", layer=20, step=60, host_kept=4),
)
# auto-gptq holds the model on the host. The rest is as gptqmodel's, on one GPU
AUTOGPTQ = (
    Placement(weights="host", layer=20, kept=4, step=60, pairs=3),
    Placement(weights="host", activations="host", layer=20, step=60, pairs=3, host_kept=4),
)
# llm-compressor keeps activations on the host, and holds the Hessians of a whole layer. It computes attention by
# products of whole samples
LLM_COMPRESSOR = (
    Placement(activations="host", shared="samples", model=2, layer=16, step=60, pairs=8, host_gpu=1800),
    Placement(weights="host", activations="host", shared="samples", layer=18, step=60, pairs=8, host_gpu=1800),
)
# AutoRound learns a number in float32 for each weight of a layer, with its gradient and what leads to it
AUTOROUND = (
    Placement(weights="host", batch=8, layer=26, kept=6, step=70),
    Placement(weights="host", activations="host", batch=8, layer=24, step=70, host_kept=6),
    Placement(weights="host", activations="host", batch=8, shared="layer", layer=24, step=70, host_kept=6),
    Placement(weights="host", activations="host", layer=24, step=70, host_kept=6),
)
