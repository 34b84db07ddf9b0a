"""Memory, disk and time of a study's jobs: rules request them from a scheduler, and `make plan` adds them up.

They follow from a model's shape and the figures of formats and engines. Device `auto` counts as `cuda`. A format or
engine without figures counts as `UNKNOWN`, enough for a tool that holds the model twice in float32.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Any

from quantmill import engines
from quantmill.build.quantizer.placement import GB, Samples, choose
from quantmill.checkpoint.model_shape import Shape
from quantmill.metrics import windows
from quantmill.plan.resources import CUDA_BUILD, FLOAT16, MB, SLOW, BuildResources, Machine, Memory, RunResources
from quantmill.quality import reference
from quantmill.report.column import limits

SNAKEMAKE = 160  # MB of Snakemake, which runs a cluster's job: a dry run of the demo takes 138
STREAMING = 50  # MB of a job that copies or converts bytes through a small buffer, whatever the model
DOWNLOADING = 90  # MB, with the client of the hub
DECODING = 300  # MB of four files of a source in low bits, written at once; MXFP4 takes 55 for each
DECODE = 8e-9  # seconds a weight to decode one, on one core
PUBLISHING = 300  # MB: 74 over LFS, for any files; Xet was not measured
TOKENIZING = 350 + CUDA_BUILD  # MB of transformers and a text's tokens
HARNESS = 1300  # MB of lm-evaluation-harness with torch: small tasks take 560, and large ones more
DOCUMENTS = 1500  # MB of the same while the library `datasets` writes a download
DOCUMENT = 2000  # positions of a task's document, at most: four endings, five examples
ANSWER = 0.05  # seconds of a task's document in addition to its forwards: small batches, decoded tokens
GGUF = 1000  # MB of llama.cpp's binding, numpy and buffers
SENSITIVITY_POSITIONS, SENSITIVITY_COPIES = 1024, 4
NAMING = 450 + CUDA_BUILD  # MB of transformers with a model without weights, and 90,000 tensors' names
RANDOM_WEIGHTS = 1000  # MB of torch, transformers and a buffer of noise
BANDWIDTH = 600  # MB: two buffers of 256 MiB, for latency.measure's copy on a CPU
PARENT = 100  # MB of the process that starts and watches the one that measures
SMALL = 50  # MB of tokenizer, config and the like
UNKNOWN = Memory(4000, weights=8)
UNKNOWN_MINUTES = 12 * 60
BYTES_AN_ID = 4  # of a file of token ids, at least: two digits, a comma and a space; single digits are rare
POSITIONS_A_BYTE = 1 / 3  # scored positions of a text, at most: the demo's tokenizer makes 0.32, Llama's 0.26
# tokens of a protocol's longest window, where the model's context is no less; lm-eval-word takes all of the context
WINDOWS = {"gptq-2048": windows.GPTQ_WINDOW, "llamacpp-512": windows.LLAMACPP_WINDOW, "hf-strided": windows.HF_WINDOW}
SAFETY = 6  # times the seconds on a slow machine
LEAST = 30  # minutes: libraries read over a network, a kernel compiled for the first time
JOB = 2.0  # seconds of Snakemake, and of a process without libraries
COMPARE = {"cpu": 3e-9, "cuda": 5e-11}  # seconds a position and token of the vocabulary (docs/FIGURES.md, "Scoring")
STREAMED = 3  # blocks of a model that runs block by block: two, and what the next one's are made of
GATE = 12  # windows that the gate scores, at most: 8 by the engine, 2 or 4 by transformers
REQUESTS_A_SLOT = 23  # loads.plan.PER_SLOT
TRIES = 24  # rates that a search for the largest one tries, at most: metrics.goodput.goodput
SOURCE_ENGINE = "transformers"  # runs a model as its author published it


@dataclass(frozen=True)
class Resources:
    """Memory and disk of a job in MB, and its seconds, None if unknown. `known`: its format and engine have figures.
    `gpu_mb`: of each GPU, of a build that chooses by it."""

    mb: int
    seconds: float | None
    disk_mb: int = 0
    known: bool = True
    gpu_mb: int = 0

    @property
    def minutes(self) -> int:
        """Minutes to request from a scheduler, if the seconds are those of a slow machine."""
        return UNKNOWN_MINUTES if self.seconds is None else max(LEAST, ceil(SAFETY * self.seconds / 60))


def job_mb(mb: int) -> int:
    """Memory to request: the program's plus Snakemake's own. At least twice Snakemake's, because fork() briefly doubles
    resident memory where a cluster adds it up."""
    return SNAKEMAKE + max(mb, SNAKEMAKE)


def fill(calibration: Mapping[str, int], model: Shape, tokens: int | None) -> int:
    """Count the tokens that a quantizer sees. Samples are cut to the model's context, and a text of `tokens` (None: a
    long one) limits their number."""
    length = min(calibration["sequence_length"], model.context or calibration["sequence_length"])
    most = calibration["samples"] if tokens is None else max(1, tokens // length)
    return min(calibration["samples"], most) * length


def reference_bytes(positions: int, model: Shape, device: str, keep: str) -> int:
    """Return the most bytes of the reference's predictions for so many positions: logits, or hidden states."""
    if keep == "logits" or not reference.keeps_states(positions, model.vocab, device):
        return reference.logits_bytes(positions, model.vocab)
    return reference.states_bytes(positions, model.vocab, model.hidden, device)


@dataclass(frozen=True)
class Jobs:
    """A study's jobs. `reference`: its format and engine. `formats`, `engines`: registered figures, by name. `machine`:
    that they run on; None: a slow one."""

    study: Mapping[str, Any]
    reference: tuple[str, str]
    formats: Mapping[str, BuildResources]
    engines: Mapping[str, RunResources]
    machine: Machine | None = None

    def artifact_bytes(self, format: str, model: Shape) -> int | None:
        """Return the bytes of an artifact's weights; None for a format without figures."""
        costs = self.formats.get(format)
        return None if costs is None else costs.size.bytes(model)

    def copy(self, model: Shape) -> Resources:
        """Plan a job that copies float16 weights into another container."""
        nbytes = FLOAT16.bytes(model)
        return Resources(job_mb(STREAMING), JOB + 2 * nbytes / self._machine.file, nbytes // MB + SMALL)

    def build(self, format: str, engine: str, model: Shape, gated: bool, tokens: int | None = None) -> Resources:
        """Plan the build of an artifact, calibrated by a text of `tokens` (None: a long one), with the quality gate if
        `gated`."""
        costs, calibration = self.formats.get(format), self.study["calibration"]
        runs = self._run_mb(format, engine, model, self._window(model)) if gated else 0
        seen = fill(calibration, model, tokens)
        if costs is None or runs is None:
            disk_mb = 8 * model.parameters // MB + SMALL  # float32, twice
            return Resources(job_mb(UNKNOWN.mb(model, seen)), None, disk_mb, known=False)
        memory = costs.cpu if self._device == "cpu" else costs.cuda
        gpu_mb, host_mb = self._place(costs, model, seen)
        mb, nbytes = memory.mb(model, seen) + host_mb, costs.size.bytes(model)
        disk_mb = (1 + costs.copies) * (nbytes // MB + SMALL)
        seconds = JOB + costs.time.seconds(self._machine, model, seen)
        seconds += (FLOAT16.bytes(model) + nbytes) / self._machine.file
        if gated:  # transformers with the same weights, then the engine
            mb = max(mb, memory.libraries + max(runs, self._source_mb(model)))
            disk_mb += (4 if self._device == "cpu" else 2) * model.parameters // MB if costs.quantized else 0
            seconds += self._start(format, engine, model) + self._expect(model)
        return Resources(job_mb(mb), seconds, disk_mb, gpu_mb=gpu_mb)

    def expect(self, model: Shape) -> Resources:
        """Plan the job that predicts with a model's source by transformers, for the gate."""
        return Resources(job_mb(self._source_mb(model)), JOB + self._expect(model))

    def imatrix(self, model: Shape) -> Resources:
        """Plan the job that runs the calibration text by llama.cpp."""
        seconds = FLOAT16.bytes(model) / self._machine.file
        seconds += self._forward(model, fill(self.study["calibration"], model, None))
        return Resources(job_mb(GGUF + FLOAT16.bytes(model) // MB), JOB + seconds)

    def sensitivity(self, model: Shape) -> Resources:
        """Plan the job that measures each matrix of a GGUF mixture: it holds the model in float32 and the logits of its
        windows."""
        predicted = 4 * SENSITIVITY_COPIES * SENSITIVITY_POSITIONS * model.vocab
        seconds = self.engines[SOURCE_ENGINE].start + 7 * model.layers * self._forward(model, SENSITIVITY_POSITIONS)
        return Resources(job_mb(GGUF + (4 * model.parameters + predicted) // MB), JOB + seconds)

    def latency(self, format: str, engine: str, model: Shape, prompts: int) -> Resources:
        """Plan a latency job: the process that measures, and its parent. Each longer prompt and each batch counts as a
        prompt."""
        protocol = self.study["latency"]
        runs = self._run_mb(format, engine, model, 0)
        if runs is None:
            return Resources(job_mb(UNKNOWN.mb(model, 0)), None, known=False)
        mb = max(PARENT + runs, BANDWIDTH if self._device == "cpu" else 0)
        further = len(protocol["prompt_tokens"]) + len(protocol["batch_sizes"])
        tokens = (protocol["repeats"] * prompts + 1 + further) * protocol["new_tokens"]
        alone = self._start(format, engine, model) + tokens * self._token(format, engine, model)
        tried = self._start(format, engine, model) if self._device == "cpu" else 0  # numbers of threads, by a process
        if self._device != "cpu" and protocol["decode"] == "captured":  # once more, without the overhead of kernels
            alone = 2 * alone - tokens * self.engines[engine].block * model.layers
        return Resources(job_mb(mb), JOB + tried + protocol["processes"] * alone)

    def load(self, format: str, engine: str, model: Shape) -> Resources:
        """Plan the loads of a server. A search for the largest rate counts all of its tries, each as one burst."""
        latency, loads = self.latency(format, engine, model, 0), self.study["loads"]
        if not latency.known:
            return latency
        new, requests = fmean(limits(loads["new_tokens"])), loads["requests"]
        rounds = [(slots, REQUESTS_A_SLOT) for slots in loads["concurrency"]]
        rounds += [(loads["burst"], 1)] if loads["burst"] else []
        rounds += [(requests, TRIES)] if loads["goodput"] else []
        seconds = 2 * self._start(format, engine, model)  # it is warmed up and looked at alone
        seconds += sum(number * new * self._token(format, engine, model, users) for users, number in rounds)
        seconds += sum(requests / rate + new * self._token(format, engine, model) for rate in loads["rates"])
        return Resources(latency.mb, JOB + loads["restarts"] * seconds)

    def score(self, format: str, engine: str, model: Shape, positions: int | None) -> Resources:
        """Plan the scoring of `positions` of a text (None: unknown), with the reference's head beside the engine where
        its states are kept."""
        runs = self._run_mb(format, engine, model, self._window(model))
        states = self.study["reference_logits"] == "auto" and (
            positions is None or reference.keeps_states(positions, model.vocab, self._device)
        )
        head = model.vocab * model.hidden if states else 0
        mb = (UNKNOWN.mb(model, 0) if runs is None else runs) + (4 if self._device == "cpu" else 2) * head // MB
        mb += self._chunk_mb(model) if states else 0
        if positions is None or runs is None:
            return Resources(job_mb(mb), None, known=runs is not None)
        seconds = self._start(format, engine, model) + positions * model.vocab * COMPARE[self._device]
        seconds += 2 * head * positions / self._machine.flops
        return Resources(job_mb(mb), JOB + seconds + self._forward(model, self._read(model, positions)))

    def tasks(self, format: str, engine: str, model: Shape, documents: int | None) -> Resources:
        """Plan the tasks of a cell, with `documents` in all (None: unknown): the engine, and lm-evaluation-harness."""
        runs = self._run_mb(format, engine, model, self._window(model))
        mb = HARNESS + (UNKNOWN.mb(model, 0) if runs is None else runs)
        if documents is None or runs is None:
            return Resources(job_mb(mb), None, known=runs is not None)
        seconds = self._start(format, engine, model) + self._forward(model, documents * DOCUMENT) + documents * ANSWER
        return Resources(job_mb(mb), JOB + seconds)

    @property
    def _device(self) -> str:
        return "cpu" if self.study["device"] == "cpu" else "cuda"

    @property
    def _machine(self) -> Machine:
        return self.machine or SLOW[self._device]

    def _place(self, costs: BuildResources, model: Shape, tokens: int) -> tuple[int, int]:
        """MB of each GPU of a build, and MB of the host beyond its format's figures, by the placement that it chooses.

        If the GPU's memory is not known, the host's MB are those of any placement, at most.
        """
        if not costs.placements or self._device == "cpu":
            return 0, 0
        words, gpus = self.study["quantizers"], self.study["quantizers"]["gpus"]
        asked, has = words.get("gpu_memory_gb"), self._machine.gpu_memory
        known = [limit for limit in (asked and asked * GB, has) if limit]
        samples = Samples(tokens, min(tokens, self.study["calibration"]["sequence_length"]))
        chosen = choose(costs.placements, model, samples, min(known, default=None), gpus)
        possible = [chosen] if known else costs.placements
        host = max(each.host_bytes(model, samples, gpus) for each in possible)
        return chosen.gpu_bytes(model, samples, gpus) // MB, host // MB

    def _window(self, model: Shape) -> int:
        """Tokens of the longest window that the study scores."""
        return min(WINDOWS.get(self.study["perplexity"], sys.maxsize), model.context or windows.CONTEXT)

    def _read(self, model: Shape, positions: int) -> int:
        """Tokens to read in order to score `positions`: overlapping windows are read more than once."""
        size = self._window(model)
        strided = self.study["perplexity"] == "hf-strided"
        return positions * size // min(windows.HF_STRIDE, size // 2) if strided else positions

    def _source_mb(self, model: Shape) -> int:
        engine = self.engines[SOURCE_ENGINE]
        if self.study["stream"]:
            return self._streamed_mb(engine, model)
        return engine.mb(model, FLOAT16.bytes(model), False, self._device, self._window(model))

    def _expect(self, model: Shape) -> float:
        """Seconds for transformers to load the source and predict the gate's windows."""
        seconds = self.engines[SOURCE_ENGINE].start + FLOAT16.bytes(model) / self._machine.file
        return seconds + self._forward(model, GATE * self._window(model))

    def _run_mb(self, format: str, engine: str, model: Shape, window: int) -> int | None:
        """MB of the process that runs a format by an engine; None if one of them has no figures."""
        costs, running = self.formats.get(format), self.engines.get(engine)
        if costs is None or running is None:
            return None
        if window and engine == SOURCE_ENGINE and self.study["stream"]:
            return self._streamed_mb(running, model) + self._chunk_mb(model)
        mb = running.mb(model, costs.size.bytes(model), costs.quantized, self._device, window)
        return mb + (self._chunk_mb(model) if window else 0)

    def _streamed_mb(self, running: RunResources, model: Shape) -> int:
        """MB of the process in which a model runs block by block; on a GPU the host only reads its blocks."""
        libraries, width = (running.cpu, 4) if self._device == "cpu" else (running.cuda, 2)
        return libraries + width * (STREAMED * model.block + model.vocab * model.hidden) // MB

    def _chunk_mb(self, model: Shape) -> int:
        """MB of a chunk of logits on the host."""
        return 4 * engines.chunk_positions(model.vocab) * model.vocab // MB if self._device == "cpu" else 0

    def _start(self, format: str, engine: str, model: Shape) -> float:
        """Seconds until an engine has loaded an artifact."""
        return self.engines[engine].start + self.formats[format].size.bytes(model) / self._machine.file

    def _token(self, format: str, engine: str, model: Shape, users: int = 1) -> float:
        """Seconds until each of `users` has one more token."""
        costs, running = self.formats[format], self.engines[engine]
        copied = running.bytes_beyond_files(costs.quantized) * model.parameters if self._device == "cpu" else 0
        read = max(costs.size.bytes(model), copied) / self._machine.bandwidth
        return running.block * model.layers + read + self._forward(model, users)

    def _forward(self, model: Shape, tokens: int) -> float:
        """Seconds of a forward over `tokens`."""
        return 2 * model.parameters * tokens / self._machine.flops
