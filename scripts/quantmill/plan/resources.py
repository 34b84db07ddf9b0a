"""What formats and engines take, as plain data. rules/formats/ and rules/engines/ register it beside each of them.

The figures are from what jobs took (docs/PERFORMANCE.md, "Memory of jobs"), a few per cent above.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantmill.checkpoint.model_shape import Shape

MB = 10**6  # as Snakemake counts mem_mb
# MB that torch's CUDA build, which is PyPI's, holds on a CPU more than its CPU build (docs/FIGURES.md). Nobody knows
# which a job will find. So what loads torch on a CPU asks for this beside what was measured with a CPU build.
CUDA_BUILD = 500
SHARD = 5 * 10**9  # bytes of a file of weights, as transformers shards; mapped whole while it is read


@dataclass(frozen=True)
class Memory:
    """MB of the host that a build takes: its libraries before any model, and bytes of what grows with the model.

    weights, tables, block: bytes a weight of the whole model, of its embeddings and head, of one block's matrices.
    activations: bytes a token of all samples and hidden unit. attention: bytes a head and pair of a sample's tokens.
    least: MB at least.
    """

    libraries: int
    weights: float = 0
    tables: float = 0
    block: float = 0
    activations: float = 0
    attention: float = 0
    least: int = 0

    def mb(self, model: Shape, calibration: Mapping[str, int]) -> int:
        """MB for a model, calibrated by so many `samples` of `sequence_length` tokens."""
        length = calibration["sequence_length"]
        grown = self.weights * model.parameters + self.tables * model.embeddings + self.block * model.block
        grown += self.activations * calibration["samples"] * length * model.hidden
        grown += self.attention * length**2 * model.heads
        return max(self.least, round(self.libraries + grown / MB))


@dataclass(frozen=True)
class Size:
    """Bytes of an artifact's weights.

    weights: a weight of the blocks' matrices. rest: a weight of anything else; None: the same. group: a group of
    `group_size` weights, which share a scale. row: a row of a matrix. input: an input of a block's matrix. head: a
    weight of a head that is stored also where the model ties it to its embeddings; None: it is as the rest. files:
    whatever the model.
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
        """Bytes for a model."""
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
    """What a format takes: its artifact, and the job that builds it.

    cpu, cuda: memory of the host, without the quality gate. quantized: the gate writes its weights out for
    transformers. forwards: over all calibration samples. group_size: the parameter that holds the size of a group.
    bits: where the parameter `size` says how large it is, bits a weight of each name that it can have.
    copies: of the artifact, that lie on the disk while it is built. like: formats that take about as long.
    """

    size: Size
    cpu: Memory
    cuda: Memory
    quantized: bool = True
    forwards: int = 0
    group_size: str | None = None
    bits: Mapping[str, float] | None = None
    copies: int = 0
    like: tuple[str, ...] = ()

    def with_parameters(self, parameters: Mapping[str, Any]) -> "BuildResources":
        """The costs with a tool's parameters; a size of groups that is left to the layers counts as the usual one."""
        if self.bits and isinstance(bits := self.bits.get(parameters["size"], parameters["size"]), (int, float)):
            return replace(self, size=replace(self.size, weights=bits / 8))
        size = parameters.get(self.group_size, "auto")
        return self if size == "auto" else replace(self, size=replace(self.size, group_size=int(size)))


@dataclass(frozen=True)
class RunResources:
    """What the process holds that runs an engine, in memory of the host.

    cpu: MB of libraries on a CPU. weights: bytes a weight held there; quantized: the same of a quantized format,
    None: no other. floor: MB that CUDA takes at least; cuda: MB of libraries there, beside what is read. logits:
    bytes a position of a window and token of the vocabulary. mapped: a file is there as well while it is read; kept:
    all of them stay. like: an engine that takes about as long, for what was never recorded.
    """

    cpu: int
    weights: float
    floor: int
    cuda: int
    quantized: float | None = None
    logits: int = 0
    mapped: bool = False
    kept: bool = False
    like: str | None = None

    def mb(self, model: Shape, nbytes: int, quantized: bool, device: str, window: int) -> int:
        """MB to run an artifact of so many bytes, and to score windows of so many tokens (0: none)."""
        logits = self.logits * window * model.vocab // MB
        read = min(nbytes, SHARD) if self.mapped and not self.kept else nbytes
        if device != "cpu":
            return max(self.floor, self.cuda + read // MB) + logits
        weights = self.quantized if quantized and self.quantized is not None else self.weights
        return round(self.cpu + (weights * model.parameters + (read if self.mapped else 0)) / MB) + logits


def costs_of(entry: Mapping[str, Any]) -> BuildResources:
    """`BuildResources` from the mapping that `dataclasses.asdict` makes of them."""
    memory = {device: Memory(**entry[device]) for device in ("cpu", "cuda")}
    return BuildResources(**{**entry, **memory, "size": Size(**entry["size"])})
