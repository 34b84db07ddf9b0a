"""One fresh process of latency.measure: python scripts/quantmill latency.worker job.json

It loads the artifact, warms up, measures every prompt, then longer prompts and batches; or it tries numbers of threads.
The job is a `LatencyTask` as JSON. What was found is JSON in the file that the job names: a `Measurement`, a `Refusal`
or a `Trial`, by the job's task.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quantmill import devices, engines
from quantmill.common.atomic import write_json
from quantmill.common.program import command
from quantmill.devices import cpu, cuda, host_load, processes
from quantmill.latency import variants
from quantmill.latency.decoding import time_tokens
from quantmill.latency.job import LatencyTask
from quantmill.quality import alignment
from quantmill.tokens.files import Tokens

COMMAND = command("latency.worker")  # and a job's file
WARM_UP_TOKENS = 2  # after each prompt
TRIAL_TOKENS = 64  # tokens of one trial of a number of threads
TRIALS = 3
TRIAL_NOISE = 0.1  # relative


@dataclass(frozen=True)
class Trial:
    """The number of CPU threads that is best."""

    threads: int


@dataclass(frozen=True)
class Refusal:
    """Why a way to decode does not fit the model."""

    mode: str
    refused: str


@dataclass(frozen=True)
class Measurement:
    """Raw runs and what the engine says of itself. Times are those of `time.perf_counter()`, so that the parent can
    tell what the device did meanwhile."""

    runs: list[dict[str, Any]]
    outputs: list[list[list[int]]]  # tokens by prompt and repeat
    largest_gaps: list[float] | None  # nats, by prompt; None for the plain way
    decode_phases: list[tuple[float, float]]
    measured: tuple[float, float]
    load: dict[str, Any] | None  # `host_load.Load`
    own: list[int]  # processes of this measurement, by their ids
    lengths: list[dict[str, Any]]
    batches: list[dict[str, Any]]
    threads: int
    load_seconds: float
    memory_bytes: dict[str, int | None]
    weight_bytes_per_token: int | None
    compute_type: str
    mode: str
    modes: list[str]
    versions: dict[str, str]
    unchecked: str | None  # why the tokens were not held against the engine's own logits
    texts: list[list[str]] | None = None  # by prompt and repeat, of a server that tells no tokens: their ids are -1


def try_threads(job: LatencyTask) -> Trial:
    """Of several numbers of CPU threads the largest that decodes about as fast as the fastest.

    Each decodes `TRIAL_TOKENS` tokens, or as many as are measured, `TRIALS` times, of which the best counts;
    `TRIAL_NOISE` is not worth a change.
    """
    if "own_threads" in engines.module(job.engine).Engine.capabilities:
        return Trial(max(job.threads))
    ids = Tokens.read(Path(job.prompts)).prompts[0].ids
    seconds, tokens = {}, min(TRIAL_TOKENS, job.new_tokens)
    for threads in job.threads:
        engine = job.load(threads)
        seconds[threads] = min(time_tokens(engine, [ids], tokens).seconds[-1] for _ in range(TRIALS))
        engine.close()
    return Trial(max(each for each in job.threads if seconds[each] <= min(seconds.values()) * (1 + TRIAL_NOISE)))


def measure(job: LatencyTask) -> Measurement | Refusal:
    """Load, warm up and measure in this process.

    After that tokens are checked against the engine's own logits, where it has them: a few of the plain way's, every
    one of another way's.
    """
    processors = cpu.processors()  # before libraries bind threads
    text = Tokens.read(Path(job.prompts))
    prompts = [prompt.ids for prompt in text.prompts]
    (threads,) = job.threads
    started = time.perf_counter()
    engine = job.load(threads)
    # another way's tokens are held against the engine's own logits
    modes = engine.modes if "logits" in engine.capabilities else engine.modes[:1]
    engine.mode = job.mode or modes[0]
    load_seconds = time.perf_counter() - started
    runs, phases, outputs, texts = [], [], [[] for _ in prompts], [[] for _ in prompts]
    total = 1 + job.repeats * len(prompts)
    with tqdm(total=total, desc=f"{engine.mode}, process {job.number}", mininterval=1) as bar:
        try:
            time_tokens(engine, [max(prompts, key=len)], job.new_tokens)
        except engines.CannotDecode as error:
            return Refusal(engine.mode, str(error))
        for ids in prompts:  # libraries choose and load kernels for each length that they meet
            time_tokens(engine, [ids], WARM_UP_TOKENS)
        bar.update()
        before = host_load.read(processors, engine.processes())
        measured_from = time.perf_counter()
        for repeat in range(job.repeats):
            for number, ids in enumerate(prompts):
                timing = time_tokens(engine, [ids], job.new_tokens)
                outputs[number].append(timing.tokens)
                texts[number] += [engine.text] if engine.text is not None else []
                phases.append(timing.decode_phase())
                runs.append({"process": job.number, "repeat": repeat, "prompt": number} | timing.raw())
                bar.update()
    memory = memory_bytes(engine, job.device)
    evaluation = Tokens.read(Path(job.evaluation)).ids if job.evaluation else []
    lengths = variants.measure_lengths(engine, job, evaluation, text.context)
    plain = engine.mode == engine.modes[0]  # no other way to decode takes several sequences
    batches = variants.measure_batches(engine, job, evaluation, max(map(len, prompts))) if plain else []
    after, measured_to = host_load.read(processors, engine.processes()), time.perf_counter()
    load = host_load.load(before, after, len(processors))
    unchecked = None
    if plain and job.number == 0:
        added = alignment.added_token(Path(job.artifact), prompts[0])
        unchecked = alignment.check_chosen(engine, prompts, added)
    pairs = zip(prompts, outputs, strict=True)
    return Measurement(
        runs=runs,
        outputs=outputs,
        texts=texts if any(texts) else None,
        largest_gaps=None if plain else [alignment.largest_gap(engine, *pair) for pair in pairs],
        decode_phases=phases,
        measured=(measured_from, measured_to),
        load=load and asdict(load),
        own=sorted(processes.tree(engine.processes())),
        lengths=lengths,
        batches=batches,
        threads=engine.threads or threads,
        load_seconds=load_seconds,
        memory_bytes=memory,
        weight_bytes_per_token=engine.weight_bytes(),
        compute_type=engine.compute_type,
        mode=engine.mode,
        modes=list(modes),
        versions=engine.versions(),
        unchecked=unchecked,
    )


def memory_bytes(engine: engines.Engine, device: str) -> dict[str, int | None]:
    """Most resident memory of the engine's processes; of GPUs, memory in use, and the most that its allocator held."""
    return {
        "resident": processes.peak_rss_bytes(engine.processes()),
        "device": cuda.used_bytes() if device == "cuda" and engine.here else None,
        "allocated": engine.peak_allocated_bytes(),
    }


def main() -> None:
    (path,) = sys.argv[1:]
    job = LatencyTask(**json.loads(Path(path).read_text(encoding="utf-8")))
    devices.resolve(job.device, gpus=job.gpus)
    write_json(Path(job.out), asdict({"measure": measure, "try_threads": try_threads}[job.task](job)))
