"""What one fresh process does: load the artifact, warm up, measure every prompt, then longer prompts and batches."""

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

import engines
from common import manifest
from devices import cpu, cuda, host_load
from scoring import alignment
from timing import variants
from timing.decoding import timed_tokens

WARM_UP_TOKENS = 2  # after each prompt
TRIAL_TOKENS = 64  # tokens of one trial of a number of threads
TRIALS = 3
TRIAL_NOISE = 0.1  # relative


def fastest_threads(options: argparse.Namespace, candidates: list[int], ids: list[int]) -> int:
    """Of several numbers of CPU threads the largest that decodes about as fast as the fastest.

    Each decodes `TRIAL_TOKENS` tokens, or as many as are measured, `TRIALS` times, of which the best counts;
    `TRIAL_NOISE` is not worth a change.
    """
    seconds, tokens = {}, min(TRIAL_TOKENS, options.new_tokens)
    for threads in candidates:
        engine = engines.load(options.engine, options.artifact, "cpu", threads)
        seconds[threads] = min(timed_tokens(engine, ids, tokens).seconds[-1] for _ in range(TRIALS))
        engine.close()
    return max(threads for threads in candidates if seconds[threads] <= min(seconds.values()) * (1 + TRIAL_NOISE))


def measure(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Load, warm up and measure in this process; returns raw runs and what the engine says of itself, or why this way
    to decode does not fit the model (`refused`). With several numbers of threads, tries these and returns the best.

    Times are those of `time.perf_counter()`, so that the parent can tell what the device did meanwhile. After that
    tokens are checked against the engine's own logits: a few of the plain way's, every one of another way's.
    """
    processors = cpu.processors()  # before libraries bind threads
    content = json.loads(options.prompts.read_text(encoding="utf-8"))
    prompts = [prompt["ids"] for prompt in content["prompts"]]
    threads = options.process_threads[0]
    if len(options.process_threads) > 1:  # in a process of its own: what the trials leave is no memory of the measured
        return {"threads": fastest_threads(options, options.process_threads, prompts[0])}
    started = time.perf_counter()
    engine = engines.load(options.engine, options.artifact, device, threads)
    engine.mode = options.process_mode or engine.modes[0]
    load_seconds = time.perf_counter() - started
    runs, phases, outputs = [], [], [[] for _ in prompts]
    total = 1 + options.repeats * len(prompts)
    with tqdm(total=total, desc=f"{engine.mode}, process {options.process}", mininterval=1) as bar:
        try:
            timed_tokens(engine, max(prompts, key=len), options.new_tokens)
        except engines.CannotDecode as error:
            return {"mode": engine.mode, "refused": str(error)}
        for ids in prompts:  # libraries choose and load kernels for each length that they meet
            timed_tokens(engine, ids, WARM_UP_TOKENS)
        bar.update()
        before = host_load.read(processors)
        measured_from = time.perf_counter()
        for repeat in range(options.repeats):
            for number, ids in enumerate(prompts):
                timed = timed_tokens(engine, ids, options.new_tokens)
                outputs[number].append(timed.tokens)
                phases.append(timed.decode_phase())
                runs.append({"process": options.process, "repeat": repeat, "prompt": number} | timed.raw())
                bar.update()
    memory = memory_bytes(engine, device)
    evaluation = json.loads(options.evaluation.read_text(encoding="utf-8"))["ids"] if options.evaluation else []
    lengths = variants.measure_lengths(engine, options, evaluation, content["context"])
    plain = engine.mode == engine.modes[0]  # no other way to decode takes several sequences
    batches = variants.measure_batches(engine, options, evaluation, max(map(len, prompts))) if plain else []
    after, measured_to = host_load.read(processors), time.perf_counter()
    load = host_load.load(before, after, len(processors))
    if plain and options.process == 0:
        alignment.check_decoding(engine, prompts, alignment.added_token(options.artifact, prompts[0]))
    pairs = zip(prompts, outputs, strict=True)
    return {
        "runs": runs,
        "outputs": outputs,
        "largest_gaps": None if plain else [alignment.largest_gap(engine, *pair) for pair in pairs],
        "decode_phases": phases,
        "measured": [measured_from, measured_to],
        "load": load and asdict(load),
        "lengths": lengths,
        "batches": batches,
        "threads": threads,
        "load_seconds": load_seconds,
        "memory_bytes": memory,
        "weight_bytes_per_token": engine.weight_bytes(),
        "compute_type": engine.compute_type,
        "mode": engine.mode,
        "modes": engine.modes,
        "versions": engine.versions(),
    }


def memory_bytes(engine: engines.Engine, device: str) -> dict[str, int | None]:
    """Most resident memory of this process; of a GPU, memory in use, and the most that the engine's allocator held."""
    allocated = getattr(engine, "peak_allocated_bytes", lambda: None)()
    used = cuda.used_bytes() if device == "cuda" else None
    return {"resident": manifest.peak_rss_bytes(), "device": used, "allocated": allocated}
