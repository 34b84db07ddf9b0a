"""Figures of formats and engines: memory, disk and time, as plain data that rules/formats/ and rules/engines/ register.

They are coarse: within a factor of 1.5 (memory) and 2 (time) of recorded jobs (tests/plan/test_plan.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from quantmill.build.quantizer.placement import Placement
from quantmill.checkpoint.model_shape import Shape

MB = 10**6  # as Snakemake counts mem_mb
# MB that torch's CUDA build, which is PyPI's, holds on a CPU beyond its CPU build (docs/FIGURES.md). A job may find
# either. Figures were measured with a CPU build, so jobs that load torch on a CPU add this.
CUDA_BUILD = 500


@dataclass(frozen=True)
class Machine:
    """Speed of a machine. flops: FLOP/s of a matrix product, float32 on a CPU and float16 on a GPU. bandwidth: bytes/s,
    read and written, of a copy in the device's memory. file: bytes/s of a file; the default is the page cache's.
    gpu_memory: bytes of a GPU; None if unknown."""

    flops: float
    bandwidth: float
    file: float = 3e9
    gpu_memory: int | None = None


# For limits of time: few machines are slower, and files are on a slow network
SLOW = {"cpu": Machine(50e9, 4e9, 50e6), "cuda": Machine(40e12, 200e9, 50e6)}
# As plan.probe measures it; for plans on a machine without a GPU
H200 = Machine(760e12, 4.2e12, gpu_memory=140 * 10**9)


@dataclass(frozen=True)
class Memory:
    """Memory of the host that a build takes. libraries: MB before any model. weights: bytes a weight. activations:
    bytes a token of all samples and hidden unit."""

    libraries: int
    weights: float = 0
    activations: float = 0

    def mb(self, model: Shape, tokens: int) -> int:
        """Return MB for a model and the tokens of all calibration samples."""
        return round(self.libraries + (self.weights * model.parameters + self.activations * tokens * model.hidden) / MB)


@dataclass(frozen=True)
class Time:
    """Time of a build: seconds of its libraries' start, nanoseconds a weight, seconds a block of layers, FLOP a weight,
    and forwards over all calibration samples."""

    start: float
    ns: float = 0
    block: float = 0
    flop: float = 0
    forwards: float = 0

    def seconds(self, machine: Machine, model: Shape, tokens: int) -> float:
        """Return seconds for a model and the tokens of all calibration samples."""
        calculated = (self.flop + 2 * self.forwards * tokens) / machine.flops
        return self.start + self.block * model.layers + (1e-9 * self.ns + calculated) * model.parameters


@dataclass(frozen=True)
class Size:
    """Bytes of an artifact's weights.

    weights: bytes a weight of the blocks' matrices. rest: a weight of anything else; None: the same. group: a group of
    `group_size` weights, which share a scale. row: a row of a matrix. input: an input of a block's matrix. head: a
    weight of a head that is stored even if the model ties it to its embeddings; None: like the rest. files: for any
    model.
    """

    weights: float
    rest: float | None = None
    group: float = 0
    group_size: int = 128
    row: float = 0
    input: float = 0
    head: float | None = None
    files: int = 0

    def bytes(self, model: Shape) -> int:
        """Return the bytes for a model."""
        blocks = model.layers * model.block
        rest, others, table = self.weights if self.rest is None else self.rest, model.parameters - blocks, 0.0
        if self.head is not None:
            of_head = model.vocab * model.hidden
            table, others = self.head * of_head, others - (of_head if model.embeddings > of_head else 0)
        shared = self.group * blocks / self.group_size + self.row * model.rows + self.input * model.inputs
        return int(self.weights * blocks + rest * others + table + shared) + self.files


FLOAT16 = Size(2)


@dataclass(frozen=True)
class BuildResources:
    """Figures of a format: its artifact, and the job that builds it.

    cpu, cuda: memory of the host, without the quality gate. placements: those that the program chooses from by the
    GPU's memory, with a GPU; none if it has no choice. quantized: the gate writes its weights out for
    transformers. group_size: the parameter that holds the size of a group. bits: bits a weight by the value of the
    parameter `size`, where that sets the artifact's size. copies: of the artifact, on the disk while it is built.
    """

    size: Size
    cpu: Memory
    cuda: Memory
    time: Time
    quantized: bool = True
    group_size: str | None = None
    bits: Mapping[str, float] | None = None
    copies: int = 0
    placements: tuple[Placement, ...] = ()

    def with_parameters(self, parameters: Mapping[str, Any]) -> "BuildResources":
        """Return the figures for a tool's parameters; a group size that the tool chooses counts as the default."""
        if self.bits and isinstance(bits := self.bits.get(parameters["size"], parameters["size"]), (int, float)):
            return replace(self, size=replace(self.size, weights=bits / 8))
        size = parameters.get(self.group_size or "", "auto")
        return self if size == "auto" else replace(self, size=replace(self.size, group_size=int(size)))


@dataclass(frozen=True)
class RunResources:
    """Figures of the process that runs an engine: memory of the host, and time.

    cpu, cuda: MB of its libraries on each device. weights: bytes a weight that it holds on a CPU, in addition to the
    artifact's files; quantized: the same for quantized formats, None: no difference. logits: bytes for each position
    of a window and token of the vocabulary. held: MB of the artifact's files that it holds, at most.
    start: seconds until it has loaded a small model. block: seconds of overhead a block of layers and token.
    """

    cpu: int
    cuda: int
    start: float
    block: float
    weights: float = 0
    quantized: float | None = None
    logits: int = 0
    held: float = inf

    def mb(self, model: Shape, nbytes: int, quantized: bool, device: str, window: int) -> int:
        """Return MB to run an artifact of `nbytes`, and to score windows of `window` tokens (0: none)."""
        read = min(nbytes / MB, self.held) + self.logits * window * model.vocab / MB
        if device != "cpu":
            return round(self.cuda + read)
        return round(self.cpu + self.bytes_beyond_files(quantized) * model.parameters / MB + read)

    def bytes_beyond_files(self, quantized: bool) -> float:
        """Return bytes a weight that it holds on a CPU, in addition to the artifact's files."""
        return self.quantized if quantized and self.quantized is not None else self.weights


def costs_of(entry: Mapping[str, Any]) -> BuildResources:
    """Make `BuildResources` from the mapping that `dataclasses.asdict` returns."""
    parts = {"size": Size, "cpu": Memory, "cuda": Memory, "time": Time}
    made = {key: parts[key](**value) if key in parts else value for key, value in entry.items()}
    return BuildResources(**made | {"placements": tuple(Placement(**each) for each in entry["placements"])})
