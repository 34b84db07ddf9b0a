"""What each job of a study takes: rules ask a scheduler for it, and `make plan` adds it up.

Memory and disk follow from a model's shape and from what formats and engines are registered to take. With device
`auto` a job asks for as much as with `cuda`. A format or engine of which nobody said what it takes asks for
`UNKNOWN`, generous for a tool that holds the whole model twice in float32, and its `Resources` says so.

Minutes are a limit to ask a cluster for: `SAFETY` times what recorded results come to, in proportion to the weights
beyond the largest model measured. Seconds are a prediction, from the same format, engine and kind of device.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

from quantmill.checkpoint.model_shape import Shape
from quantmill.common.program import PACKAGE
from quantmill.metrics import windows
from quantmill.plan.durations import COMPARE, START, Rates, load_rows
from quantmill.plan.resources import CUDA_BUILD, FLOAT16, MB, BuildResources, Memory, RunResources

SNAKEMAKE = 160  # MB of Snakemake itself, with which a cluster's job runs its command: a dry run of the demo takes 138
STREAMING = 50  # MB of a job that copies or converts bytes through a small buffer, whatever the model
DOWNLOADING = 90  # MB, with the client of the hub
PUBLISHING = 300  # MB: 74 over LFS, whatever the files; what Xet holds of them was not measured
TOKENIZING = 350 + CUDA_BUILD  # MB of transformers and a text's tokens
HARNESS = 1300  # MB of lm-evaluation-harness with torch, of which small tasks take 560; the rest is for large ones
DOCUMENTS = 1500  # MB of the same, while the library `datasets` writes what it fetched
DOCUMENT = 2000  # positions that an engine reads for a document of a task, at most: four endings, five examples
ANSWER = 0.05  # seconds a document of a task besides: small batches, tokens that are written
NAMING = 450 + CUDA_BUILD  # MB of transformers with a model without weights, and 90,000 tensors' names
RANDOM_WEIGHTS = 1000  # MB of torch, transformers and a buffer of noise
BANDWIDTH = 600  # MB: two buffers of 256 MiB, with which latency.measure measures how fast a CPU's memory is
KEPT = 0.8  # of a tool's libraries, while the gate runs what it built
PARENT = 100  # MB of the process that starts and watches the one that measures
SMALL = 50  # MB of tokenizer, config and the like
UNKNOWN = Memory(4000, weights=8)
UNKNOWN_MINUTES = 12 * 60
BYTES_AN_ID = 4  # of a file of token ids, at least: two digits, a comma and a space; single digits are rare
POSITIONS_A_BYTE = 1 / 3  # scored positions of a text, at most: the demo's tokenizer makes 0.32, Llama's 0.26
# tokens of a protocol's longest window, where the model's context is no less; lm-eval-word takes all of the context
WINDOWS = {"gptq-2048": windows.GPTQ_WINDOW, "llamacpp-512": windows.LLAMACPP_WINDOW, "hf-strided": windows.HF_WINDOW}
SAFETY = 4  # times what was recorded: an older card, fewer cores, a slow file system
LEAST = 30  # minutes: libraries read over a network, a kernel compiled for the first time
STREAM = 50e6  # bytes a second that a job reads or writes, at least
PREFILL = 3.2e-11  # seconds a token and weight on a CPU, where nothing was recorded: 138M weights, 2 cores
GATE = 12 * 2048  # positions that the gate scores, at most: 8 windows by the engine, 2 or 4 by transformers
SOURCE_FORMAT, SOURCE_ENGINE = "fp16", "transformers"  # what runs a model as its author published it
RECORDED = [PACKAGE.parents[1] / f"results/{study}/results.json" for study in ("demo", "h200", "h200-served")]


@dataclass(frozen=True)
class Resources:
    """What a job asks for: MB of memory and disk, minutes at most; and the seconds that it is likely to take, None
    where nothing recorded tells. `known` is False where nobody said what its format or engine takes."""

    mb: int
    minutes: int
    disk_mb: int = 0
    seconds: float | None = None
    known: bool = True


def job_mb(mb: int) -> int:
    """What a job asks for: what its program takes, and Snakemake, which is there too in a cluster's job; at least
    Snakemake twice, since where a cluster adds up resident memory, who starts a program counts twice while it does."""
    return SNAKEMAKE + max(mb, SNAKEMAKE)


def limit(seconds: float | None) -> int:
    """Minutes that a job asks for, of so many seconds as it would take where it was measured (None: nowhere)."""
    return UNKNOWN_MINUTES if seconds is None else max(LEAST, ceil(SAFETY * seconds / 60))


def fill(calibration: Mapping[str, int], model: Shape, tokens: int | None) -> dict[str, int]:
    """The calibration as it will be: samples no longer than the model's context, and no more than a text of so many
    tokens (None: enough) fills."""
    length = min(calibration["sequence_length"], model.context or calibration["sequence_length"])
    most = calibration["samples"] if tokens is None else max(1, tokens // length)
    return {"samples": min(calibration["samples"], most), "sequence_length": length}


def logits_bytes(text_bytes: int, vocab: int) -> int:
    """Bytes of the reference's logits over a text, at most: float16, for each position and token of the vocabulary."""
    return int(text_bytes * POSITIONS_A_BYTE) * vocab * 2


@dataclass(frozen=True)
class Jobs:
    """A study's jobs. `reference`: its format and engine. `formats` and `engines` are what is registered by name; None
    where nobody said what it takes. `rows` are recorded results."""

    study: Mapping[str, Any]
    reference: tuple[str, str]
    formats: Mapping[str, BuildResources | None]
    engines: Mapping[str, RunResources | None]
    rows: list[dict[str, Any]] = field(default_factory=lambda: load_rows(RECORDED))

    def artifact_bytes(self, format: str, model: Shape) -> int | None:
        """Bytes of an artifact's weights; None for a format of which nobody said."""
        costs = self.formats.get(format)
        return None if costs is None else costs.size.bytes(model)

    def copy(self, model: Shape) -> Resources:
        """A job that reads float16 weights and writes them again, in another container."""
        disk_mb = FLOAT16.bytes(model) // MB + SMALL
        seconds = self._rates((SOURCE_FORMAT,), None, model).build(0)
        return Resources(job_mb(STREAMING), self._build_limit(seconds, model, 0), disk_mb)

    def build(self, format: str, engine: str, model: Shape, gated: bool, tokens: int | None = None) -> Resources:
        """The job that builds an artifact, calibrated by a text of so many tokens (None: enough), and that runs it in
        the quality gate, where it is `gated`."""
        costs, calibration = self.formats.get(format), self.study["calibration"]
        runs = self._run_mb(format, engine, model, self._window(model)) if gated else 0
        if costs is None or runs is None:
            float32 = 4 * model.parameters
            return Resources(
                job_mb(UNKNOWN.mb(model, calibration)), UNKNOWN_MINUTES, 2 * float32 // MB + SMALL, known=False
            )
        cpu = self.study["device"] == "cpu"
        seen = fill(calibration, model, tokens)
        memory = costs.cpu if cpu else costs.cuda
        mb = memory.mb(model, seen)
        artifact_mb = self.artifact_bytes(format, model) // MB + SMALL
        disk_mb = (1 + costs.copies) * artifact_mb
        if gated:  # transformers with the same weights, then the engine
            kept = KEPT * max(memory.libraries, memory.least)
            mb = max(mb, round(kept) + max(runs, self._source_mb(model)))
            disk_mb += (4 if cpu else 2) * model.parameters // MB if costs.quantized else 0
        forwards = costs.forwards * calibration["samples"] * calibration["sequence_length"] + (GATE if gated else 0)
        like = self._rates(costs.like or (format,), None, model).build(0)
        minutes = self._build_limit(like, model, forwards)
        seconds = self._rates((format,), None, model, strict=True).build(seen["samples"] * seen["sequence_length"])
        return Resources(job_mb(mb), minutes, disk_mb, seconds)

    def expect(self, model: Shape) -> Resources:
        """The job that runs a model's source by transformers, for the gate to compare with."""
        seconds = self._rates((SOURCE_FORMAT,), None, model).build(0)  # to read the weights
        return Resources(job_mb(self._source_mb(model)), self._build_limit(seconds, model, GATE))

    def latency(self, format: str, engine: str, model: Shape, prompts: int) -> Resources:
        """A latency job: the process that measures, and the one that started it. For its limit a longer prompt and a
        batch of whatever size count as a prompt each."""
        protocol = self.study["latency"]
        runs = self._run_mb(format, engine, model, 0)
        mb = UNKNOWN.mb(model, self.study["calibration"]) if runs is None else PARENT + runs
        further = len(protocol["prompt_tokens"]) + len(protocol["batch_sizes"])
        seconds = self._similar_rates(format, engine, model).latency(protocol, prompts + further)
        return Resources(
            job_mb(max(mb, BANDWIDTH) if self.study["device"] == "cpu" else mb),
            limit(seconds),
            seconds=self._rates((format,), engine, model, strict=True).latency(protocol, prompts),
            known=runs is not None,
        )

    def load(self, format: str, engine: str, model: Shape) -> Resources:
        """The job that puts a server under the study's loads."""
        latency, loads = self.latency(format, engine, model, 0), self.study["loads"]
        minutes = limit(self._similar_rates(format, engine, model).loads(loads))
        seconds = self._rates((format,), engine, model, strict=True).loads(loads)
        return Resources(latency.mb, minutes, seconds=seconds, known=latency.known)

    def score(self, format: str, engine: str, model: Shape, positions: int | None) -> Resources:
        """The job that scores so many positions of a text (None: unknown), and in which the reference runs beside it
        where its logits are not kept."""
        cells = [(format, engine)]
        cells += [self.reference] if self.study["reference_logits"] == "recompute" else []
        runs = [self._run_mb(format, engine, model, self._window(model)) for format, engine in cells]
        mb = sum(UNKNOWN.mb(model, self.study["calibration"]) if each is None else each for each in runs)
        if positions is None or None in runs:
            return Resources(job_mb(mb), UNKNOWN_MINUTES, known=None not in runs)
        compare, read = positions * model.vocab * COMPARE, self._read(model, positions)
        minutes = limit(len(cells) * (START + self._forward(model, read)) + compare)
        seconds = self._rates((format,), engine, model, strict=True).scoring(read, model.vocab)
        return Resources(job_mb(mb), minutes, seconds=seconds)

    def tasks(self, format: str, engine: str, model: Shape, documents: int | None) -> Resources:
        """The job that runs tasks of so many documents together (None: unknown): the engine, and what asks it."""
        runs = self._run_mb(format, engine, model, self._window(model))
        mb = HARNESS + (UNKNOWN.mb(model, self.study["calibration"]) if runs is None else runs)
        if documents is None or runs is None:
            return Resources(job_mb(mb), UNKNOWN_MINUTES, known=runs is not None)
        return Resources(job_mb(mb), limit(START + self._forward(model, documents * DOCUMENT) + documents * ANSWER))

    def _window(self, model: Shape) -> int:
        """Tokens of the longest window that the study scores."""
        return min(WINDOWS.get(self.study["perplexity"], sys.maxsize), model.context or windows.CONTEXT)

    def _read(self, model: Shape, positions: int) -> int:
        """Tokens that are read to score so many: windows that overlap are read more than once."""
        size = self._window(model)
        strided = self.study["perplexity"] == "hf-strided"
        return positions * size // min(windows.HF_STRIDE, size // 2) if strided else positions

    def _source_mb(self, model: Shape) -> int:
        engine = self.engines[SOURCE_ENGINE]
        return engine.mb(model, FLOAT16.bytes(model), False, self.study["device"], self._window(model))

    def _run_mb(self, format: str, engine: str, model: Shape, window: int) -> int | None:
        """MB of the process that runs a format by an engine; None where nobody said what one of them takes."""
        costs, running = self.formats.get(format), self.engines.get(engine)
        if costs is None or running is None:
            return None
        return running.mb(model, self.artifact_bytes(format, model), costs.quantized, self.study["device"], window)

    def _rates(self, formats: tuple[str, ...], engine: str | None, model: Shape, strict: bool = False) -> Rates:
        """Times of formats by an engine (None: any); `strict` as far as they were measured, else for any model."""
        device = "cpu" if self.study["device"] == "cpu" else "cuda"
        return Rates(self.rows, device, formats, engine, model.parameters, *([] if strict else [inf]))

    def _similar_rates(self, format: str, engine: str, model: Shape) -> Rates:
        """Times of a format by an engine, or of what takes about as long."""
        costs, running = self.formats.get(format), self.engines.get(engine)
        return self._rates((costs and costs.like) or (format,), (running and running.like) or engine, model)

    def _forward(self, model: Shape, tokens: int) -> float:
        """Seconds of a forward over a text of so many tokens, as fast as transformers reads prompts."""
        whole = self._rates((SOURCE_FORMAT,), SOURCE_ENGINE, model).scoring(tokens, 0)
        return PREFILL * model.parameters * tokens if whole is None else whole - START

    def _build_limit(self, seconds: float | None, model: Shape, forwards: int) -> int:
        """Minutes to read weights and write an artifact, and for forwards of so many tokens."""
        if seconds is None:
            return UNKNOWN_MINUTES
        return limit(seconds + 4 * model.parameters / STREAM + self._forward(model, forwards))
