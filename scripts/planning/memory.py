"""How much memory of the host a job takes, from its model's shape: what a cluster must give it.

The figures are from what jobs took (docs/PERFORMANCE.md, "Memory of jobs"), a few per cent above. With device `auto` a
job may get a GPU, whose libraries take more, so that it asks for as much as with `cuda`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from metrics import windows
from planning import disk, shape
from planning.shape import Shape

MB = 10**6  # as Snakemake counts mem_mb
SHARD = 5 * 10**9  # bytes of a file of weights, as transformers shards; mapped whole while it is read
SNAKEMAKE = 160  # MB of Snakemake itself, with which a cluster's job runs its command: a dry run of the demo takes 138
STREAMING = 50  # MB of a job that copies or converts bytes through a small buffer, whatever the model
DOWNLOADING = 90  # MB, with the client of the hub
TOKENIZING = 350  # MB of transformers and a text's tokens
RANDOM_WEIGHTS = 1000  # MB of torch, transformers and a buffer of noise
BYTES_AN_ID = 4  # of a file of token ids, at least: two digits, a comma and a space; single digits are rare
BANDWIDTH = 600  # MB: two buffers of 256 MiB, with which latency.py measures how fast a CPU's memory is
KEPT = 0.8  # of a tool's libraries, while the gate runs what it built
PARENT = 100  # MB of the process that starts and watches the one that measures
# tokens of a protocol's longest window, where the model's context is no less; lm-eval-word takes all of the context
WINDOWS = {"gptq-2048": windows.GPTQ_WINDOW, "llamacpp-512": windows.LLAMACPP_WINDOW, "hf-strided": windows.HF_WINDOW}


@dataclass(frozen=True)
class Rate:
    """MB of libraries before any model, on a CPU and where CUDA may start, and what grows with the model.

    weights: bytes a weight; table: bytes a weight of embeddings and head.
    """

    cpu: int
    cuda: int
    weights: float = 0
    table: float = 0

    def mb(self, model: Shape, device: str) -> int:
        """MB for a model."""
        grown = self.weights * model.parameters + self.table * model.embeddings
        return round((self.cpu if device == "cpu" else self.cuda) + grown / MB)


CONVERSIONS = {  # format -> what writes it
    "fp16": Rate(STREAMING, STREAMING),
    "ct2-float32": Rate(430, 935, weights=6.2),
    "ct2-float16": Rate(430, 935, weights=2.7),
    "ct2-int8": Rate(430, 935, weights=2.7, table=4),  # a table is quantized in float32
    "mlc-q4f16_1": Rate(74, 255),
}
LIBRARY = Rate(320, 1000)  # compiles a model's kernels
TOOLS = {"gptq-int4": "gptqmodel", "awq-int4": "autoawq", "autogptq-int4": "autogptq"}
QUANTIZERS = {"gptqmodel": Rate(945, 2310), "autoawq": Rate(1260, 2045), "autogptq": Rate(525, 2045)}  # libraries


@dataclass(frozen=True)
class Engine:
    """What the process that runs a format holds: on a CPU libraries (MB) and bytes a weight; on a GPU, in MB of the
    host, what CUDA takes at least (`floor`), or libraries beside what is read. `mapped`: files are there as well.

    logits: bytes a position of a window and token of the vocabulary.
    """

    cpu: int
    weights: float
    floor: int
    cuda: int
    logits: int = 0
    mapped: bool = False


ENGINES = {
    "fp16": Engine(cpu=420, weights=4, floor=1845, cuda=1100, mapped=True),
    "ct2-float32": Engine(cpu=97, weights=4, floor=670, cuda=450, logits=16),
    "ct2-float16": Engine(cpu=97, weights=4, floor=670, cuda=450, logits=16),
    "ct2-int8": Engine(cpu=97, weights=1, floor=670, cuda=450, logits=16),
    "gptq-int4": Engine(cpu=715, weights=2, floor=2020, cuda=1590, mapped=True),
    "awq-int4": Engine(cpu=715, weights=2, floor=2020, cuda=1590, mapped=True),
    "autogptq-int4": Engine(cpu=715, weights=2, floor=1940, cuda=1510, mapped=True),
    "mlc-q4f16_1": Engine(cpu=122, weights=0.57, floor=725, cuda=725, logits=16),
}


def engine_mb(format: str, model: Shape, device: str, window: int = 0) -> int:
    """MB of the process that runs a format, which scores windows of so many tokens. A format that is not in the table
    counts as fp16."""
    engine = ENGINES.get(format, ENGINES["fp16"])
    logits = engine.logits * min(window, model.context or windows.CONTEXT) * model.vocab // MB
    read = disk.artifact_bytes(format, model) or 2 * model.parameters
    if engine.mapped:
        read = min(read, SHARD)
    if device != "cpu":
        return max(engine.floor, engine.cuda + read // MB) + logits
    held = engine.weights * model.parameters + (read if engine.mapped else 0)
    return round(engine.cpu + held / MB) + logits


def window(protocol: str) -> int:
    """Tokens of the longest window that a protocol scores, before the model's context is asked."""
    return WINDOWS.get(protocol, sys.maxsize)


def latency_mb(format: str, model: Shape, device: str) -> int:
    """MB of a latency job: the process that measures, and the one that started it."""
    mb = PARENT + engine_mb(format, model, device)
    return max(mb, BANDWIDTH) if device == "cpu" else mb


def build_mb(
    format: str, model: Shape, calibration: Mapping[str, int], device: str, gated: bool, protocol: str = "gptq-2048"
) -> int:
    """MB to build an artifact, and to run it beside what built it where a gate does. A format that is not in the table
    counts as CTranslate2's int8."""
    if format in TOOLS:
        libraries = QUANTIZERS[TOOLS[format]]
        mb = quantizer_mb(model, TOOLS[format], calibration, device)
    else:
        libraries = CONVERSIONS.get(format, CONVERSIONS["ct2-int8"])
        mb = libraries.mb(model, device)
    if not gated:
        return mb
    kept = KEPT * (libraries.cpu if device == "cpu" else libraries.cuda)
    runs = ("fp16", format)  # transformers with the same weights, then the engine
    return max(mb, round(kept) + max(engine_mb(name, model, device, window(protocol)) for name in runs))


def filled(calibration: Mapping[str, int], model: Shape, tokens: int | None) -> dict[str, int]:
    """The calibration as it will be: samples no longer than the model's context, and no more than a text of so many
    tokens (None: enough) fills."""
    length = min(calibration["sequence_length"], model.context or calibration["sequence_length"])
    most = calibration["samples"] if tokens is None else max(1, tokens // length)
    return {"samples": min(calibration["samples"], most), "sequence_length": length}


def quantization_mb(folder: Path, tool: str, calibration: Mapping[str, int], device: str) -> int:
    """`quantizer_mb` of the model in a folder. Raises `FileNotFoundError` where it is not there yet: Snakemake then
    asks again."""
    return quantizer_mb(shape.of_folder(folder), tool, calibration, device)


def quantizer_mb(model: Shape, tool: str, calibration: Mapping[str, int], device: str) -> int:
    """MB that quantizing a model takes.

    On a CPU gptqmodel holds embeddings, head and one block at a time (in float32, twice: as read and as changed),
    autoawq and auto-gptq the whole model likewise and a few copies of one block. All keep the samples' activations and
    the attention of one sample. On a GPU attention and blocks at work are there, and the host keeps what waits:
    gptqmodel embeddings, head and a block (once and a half), the others the whole model in float16, which is gone when
    CUDA's libraries are there.
    """
    length = filled(calibration, model, None)["sequence_length"]
    tokens = calibration["samples"] * length
    if device != "cpu":
        if tool == "gptqmodel":
            grown = 3 * (model.embeddings + model.block) + 12 * tokens * model.hidden
            return QUANTIZERS[tool].cuda + grown // MB
        return max(QUANTIZERS[tool].cuda, 1210 + 2 * model.parameters // MB + 12 * tokens * model.hidden // MB)
    weights = 8 * (model.embeddings + model.block) if tool == "gptqmodel" else 8 * model.parameters + 12 * model.block
    return QUANTIZERS[tool].cpu + (weights + 24 * tokens * model.hidden + 8 * length**2 * model.heads) // MB
