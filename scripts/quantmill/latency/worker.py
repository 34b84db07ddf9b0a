"""Measure in a fresh process of latency.measure, which passes it a `LatencyTask` (devices.fresh_process).

It loads the artifact, warms up, and measures every prompt, then longer prompts and batches. Or it tries numbers of
threads. The answer is a `Measurement`, a `Refusal`, or the best number of threads.
"""

import time
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from quantmill import engines
from quantmill.common.program import command
from quantmill.devices import cpu, cuda, host_load, processes
from quantmill.devices.fresh_process import answer_task
from quantmill.latency import variants
from quantmill.latency.decoding import time_tokens
from quantmill.latency.job import LatencyTask
from quantmill.metrics.footprint import Footprint
from quantmill.quality import alignment
from quantmill.tokens.files import Tokens

COMMAND = command("latency.worker")
WARM_UP_TOKENS = 2  # after each prompt
TRIAL_TOKENS = 64  # tokens of one trial of a number of threads
TRIALS = 3
TRIAL_NOISE = 0.1  # relative


@dataclass(frozen=True)
class Refusal:
    """The reason why a way to decode does not fit the model, or its memory."""

    mode: str
    refused: str


@dataclass(frozen=True)
class Measurement:
    """Raw runs, and what the engine reports about itself. Times are of `time.perf_counter()`, which the parent process
    shares: it compares them with its samples of the device."""

    runs: list[dict[str, Any]]  # as the result file keeps them
    outputs: list[list[list[int]]]  # tokens by prompt and repeat
    largest_gaps: list[float] | None  # nats, by prompt; None for the plain way
    decode_phases: list[tuple[float, float]]
    measured: tuple[float, float]
    load: host_load.Load | None
    own: list[int]  # process ids of this measurement
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
    unchecked: str | None  # why the tokens were not compared with the engine's own logits
    footprint: Footprint | None = None  # of the first process
    texts: list[list[str]] | None = None  # by prompt and repeat, from a server that reports no ids: they are -1


def try_threads(job: LatencyTask) -> int:
    """Return the largest number of CPU threads that decodes about as fast as the fastest one.

    Each number decodes `TRIAL_TOKENS` tokens, or as many as are measured, `TRIALS` times, and its best time counts. A
    gain below `TRIAL_NOISE` is ignored.
    """
    if "own_threads" in engines.module(job.engine).Engine.capabilities:
        return max(job.threads)
    ids = Tokens.read(job.prompts).prompts[0].ids
    seconds, tokens = {}, min(TRIAL_TOKENS, job.protocol.new_tokens)
    for threads in job.threads:
        engine = job.load(threads)
        if engine.no_decoding:
            return max(job.threads)
        seconds[threads] = min(time_tokens(engine, [ids], tokens).seconds[-1] for _ in range(TRIALS))
        engine.close()
    return max(each for each in job.threads if seconds[each] <= min(seconds.values()) * (1 + TRIAL_NOISE))


def measure(job: LatencyTask) -> Measurement | Refusal:
    """Load, warm up and measure in this process.

    Then compare tokens with the engine's own logits, if it has them: a few tokens of the plain way, all of another way.
    """
    processors = cpu.processors()  # before libraries bind threads
    text = Tokens.read(job.prompts)
    prompts = [prompt.ids for prompt in text.prompts]
    (threads,) = job.threads
    started = time.perf_counter()
    engine = job.load(threads)
    # an engine without logits cannot check the tokens of another way
    modes = engine.modes if "logits" in engine.capabilities else engine.modes[:1]
    engine.mode = job.mode or modes[0]
    load_seconds = time.perf_counter() - started
    if engine.no_decoding:
        return Refusal(engine.mode, engine.no_decoding)
    runs, phases = [], []
    outputs: list[list[list[int]]] = [[] for _ in prompts]
    texts: list[list[str]] = [[] for _ in prompts]
    total = 1 + job.protocol.repeats * len(prompts)
    with tqdm(total=total, desc=f"{engine.mode}, process {job.number}", mininterval=1) as bar:
        try:
            time_tokens(engine, [max(prompts, key=len)], job.protocol.new_tokens)
        except engines.CannotDecode as error:
            return Refusal(engine.mode, str(error))
        for ids in prompts:  # libraries choose and load kernels for each new length
            time_tokens(engine, [ids], WARM_UP_TOKENS)
        bar.update()
        before = host_load.read(processors, engine.processes())
        measured_from = time.perf_counter()
        for repeat in range(job.protocol.repeats):
            for number, ids in enumerate(prompts):
                timing = time_tokens(engine, [ids], job.protocol.new_tokens)
                outputs[number].append(timing.tokens)
                texts[number] += [engine.text] if engine.text is not None else []
                phases.append(timing.decode_phase())
                runs.append({"process": job.number, "repeat": repeat, "prompt": number} | timing.raw())
                bar.update()
    memory = memory_bytes(engine, job.device)
    evaluation = Tokens.read(job.evaluation).ids
    lengths = variants.measure_lengths(engine, job, evaluation, text.context)
    plain = engine.mode == engine.modes[0]  # other ways decode one sequence at a time
    batches = variants.measure_batches(engine, job, evaluation, max(map(len, prompts))) if plain else []
    after, measured_to = host_load.read(processors, engine.processes()), time.perf_counter()
    unchecked = footprint = None
    if plain and job.number == 0:
        footprint = engine.footprint()
        added = alignment.added_token(job.artifact, prompts[0])
        unchecked = alignment.check_chosen(engine, prompts, added)
    pairs = zip(prompts, outputs, strict=True)
    return Measurement(
        runs=runs,
        outputs=outputs,
        texts=texts if any(texts) else None,
        largest_gaps=None if plain else [alignment.largest_gap(engine, *pair) for pair in pairs],
        decode_phases=phases,
        measured=(measured_from, measured_to),
        load=host_load.load(before, after, len(processors)),
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
        footprint=footprint,
    )


def memory_bytes(engine: engines.Engine, device: str) -> dict[str, int | None]:
    """Peak resident memory of the engine's processes; of GPUs, memory in use and the peak of its allocator."""
    return {
        "resident": processes.peak_rss_bytes(engine.processes()),
        "device": cuda.used_bytes() if device == "cuda" and engine.here else None,
        "allocated": engine.peak_allocated_bytes(),
    }


def work(job: LatencyTask) -> Measurement | Refusal | int:
    """Do a task: try threads if it names several numbers of them, else measure."""
    return measure(job) if len(job.threads) == 1 else try_threads(job)


def main() -> None:
    answer_task(work)
