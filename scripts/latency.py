#!/usr/bin/env python3
"""Measure how fast an engine decodes one artifact: batch 1, greedy, a fixed number of tokens after each prompt.

    python scripts/latency.py ARTIFACT OUT --engine transformers --prompts prompts.json

Each of --processes fresh processes loads the artifact, decodes the longest prompt once to warm up, and then every
prompt --repeats times. On a CPU the first process also tries how many threads decode fastest: small models lose far
more at the threads' barriers than they win. A token's time is when it was on the host. OUT is a JSON
file with every raw time, the summary (TTFT, TPOT, tokens/s with its interval), memory, and the device's copy
bandwidth, measured here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

import devices
import engines
from common import manifest
from common.program import UserError, parser, run
from common.publish import publish_json
from devices import cpu, cuda
from metrics import METRICS_VERSION, latency

TRIAL_TOKENS = 64  # tokens of one trial of a number of threads
TRIALS = 3
TRIAL_NOISE = 0.1  # relative


def timed_tokens(engine: engines.Engine, ids: list[int], n: int) -> tuple[list[int], list[float]]:
    """Decode n tokens; return them and the seconds from the start to each.

    Raises `UserError` unless n came, at times that can be.
    """
    start = time.perf_counter()
    stamped = list(engine.prefill_decode(ids, n))
    end = time.perf_counter()
    if len(stamped) != n:
        raise UserError(f"the engine returned {len(stamped)} tokens where {n} were asked for: its times do not count")
    stamps = [start, *(at for _, at in stamped), end]
    if any(later < earlier for earlier, later in pairwise(stamps)):
        raise UserError("the engine stamped its tokens with times that cannot be: its times do not count")
    return [token for token, _ in stamped], [at - start for _, at in stamped]


def fastest_threads(options: argparse.Namespace, candidates: list[int], ids: list[int]) -> int:
    """Of several numbers of CPU threads the largest that decodes about as fast as the fastest.

    Each decodes `TRIAL_TOKENS` tokens `TRIALS` times, of which the best counts; `TRIAL_NOISE` is not worth a change.
    """
    if len(candidates) == 1:
        return candidates[0]
    seconds = {}
    for threads in candidates:
        engine = engines.load(options.engine, options.artifact, "cpu", threads)
        seconds[threads] = min(timed_tokens(engine, ids, TRIAL_TOKENS)[1][-1] for _ in range(TRIALS))
        engine.close()
    return max(threads for threads in candidates if seconds[threads] <= min(seconds.values()) * (1 + TRIAL_NOISE))


def measure_here(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Load, warm up and measure in this process; returns raw runs and what the engine says of itself."""
    prompts = [prompt["ids"] for prompt in json.loads(options.prompts.read_text(encoding="utf-8"))["prompts"]]
    threads = fastest_threads(options, options.process_threads, prompts[0])
    started = time.perf_counter()
    engine = engines.load(options.engine, options.artifact, device, threads)
    load_seconds = time.perf_counter() - started
    runs, outputs = [], [[] for _ in prompts]
    total = 1 + options.repeats * len(prompts)
    with tqdm(total=total, desc=f"process {options.process}", mininterval=1) as bar:
        timed_tokens(engine, max(prompts, key=len), options.new_tokens)
        bar.update()
        for repeat in range(options.repeats):
            for number, ids in enumerate(prompts):
                tokens, seconds = timed_tokens(engine, ids, options.new_tokens)
                outputs[number].append(tokens)
                runs.append({"repeat": repeat, "prompt": number, "token_seconds": [round(s, 7) for s in seconds]})
                bar.update()
    peak = cuda.used_bytes() if device == "cuda" else manifest.peak_rss_bytes()
    return {
        "runs": [{"process": options.process} | each for each in runs],
        "outputs": outputs,
        "threads": threads,
        "load_seconds": load_seconds,
        "peak_memory_bytes": peak,
        "weight_bytes_per_token": engine.weight_bytes(),
        "compute_type": engine.compute_type,
        "mode": engine.mode,
        "versions": engine.versions(),
    }


def check_length(options: argparse.Namespace) -> None:
    """Refuse prompts and new tokens that together exceed the model's context, whether the engine minds or not."""
    content = json.loads(options.prompts.read_text(encoding="utf-8"))
    longest = max(len(prompt["ids"]) for prompt in content["prompts"]) + options.new_tokens
    if content["context"] and longest > content["context"]:
        raise UserError(
            f"{options.artifact}: longest prompt + new tokens = {longest} exceeds its context of {content['context']}; "
            "lower latency.new_tokens, or shorten the prompts"
        )


def measure_in_processes(options: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Run this program once a process, one after the other. Where one fails, its own line says why."""
    most = min(options.threads, cpu.available_threads())
    threads = [most] if device == "cuda" else sorted({1, (most + 1) // 2, most})
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for process in range(options.processes):
            out = Path(folder) / f"{process}.json"
            command = [sys.executable, *sys.argv, "--process", str(process), "--process-out", str(out)]
            command += ["--process-threads", *map(str, threads)]
            status = subprocess.run(command).returncode
            if status < 0:
                raise UserError(f"{options.artifact}: its process was killed by signal {-status}; was memory short?")
            if status:
                sys.exit(status)
            results.append(json.loads(out.read_text(encoding="utf-8")))
            threads = [results[0]["threads"]]
    return results


def assemble(options: argparse.Namespace, processes: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """The result file: protocol, raw samples, summary."""
    runs = [each for process in processes for each in process["runs"]]
    samples = [latency.Run(r["process"], r["repeat"], r["prompt"], tuple(r["token_seconds"])) for r in runs]
    summary = latency.summary(samples)
    first = processes[0]
    weight_bytes = first["weight_bytes_per_token"]
    summary |= {
        "peak_memory_bytes": max(process["peak_memory_bytes"] for process in processes),
        "bandwidth_fraction": weight_bytes * summary["tokens_per_second"] / bandwidth,
    }
    prompts = json.loads(options.prompts.read_text(encoding="utf-8"))["prompts"]
    by_prompt = [
        [tokens for process in processes for tokens in process["outputs"][number]] for number in range(len(prompts))
    ]
    return {
        "kind": "latency",
        "metrics_version": METRICS_VERSION,
        "artifact": manifest.read(options.artifact),
        "engine": options.engine,
        "protocol": {
            "batch": 1,
            "decoding": "greedy, end-of-sequence disabled",
            "new_tokens": options.new_tokens,
            "repeats": options.repeats,
            "processes": options.processes,
            "warm_up": "the longest prompt, full length, in every process",
        },
        "summary": summary,
        "copy_bandwidth_bytes_per_second": bandwidth,
        "deterministic": all(tokens == group[0] for group in by_prompt for tokens in group),
        "prompts": [
            {"text": prompt["text"], "tokens": len(prompt["ids"]), "output_ids": group[0]}
            for prompt, group in zip(prompts, by_prompt, strict=True)
        ],
        **{key: first[key] for key in ("compute_type", "mode", "versions", "weight_bytes_per_token")},
        "load_seconds": [process["load_seconds"] for process in processes],
        "runs": runs,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--engine", required=True, help="a module of scripts/engines")
    arguments.add_argument("--prompts", type=Path, required=True, help="what tokenize_texts.py wrote")
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda")
    arguments.add_argument("--threads", type=int, default=cpu.available_threads(), help="CPU threads at most")
    arguments.add_argument("--new-tokens", type=int, default=200)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--processes", type=int, default=3)
    arguments.add_argument("--process", type=int, help=argparse.SUPPRESS)  # this program's own calls of itself
    arguments.add_argument("--process-out", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--process-threads", type=int, nargs="+", help=argparse.SUPPRESS)
    options = arguments.parse_args()

    device = devices.resolve(options.device)
    if options.process is not None:
        publish_json(options.process_out, measure_here(options, device))
        return
    manifest.read(options.artifact)  # refuses what is no artifact before any work
    check_length(options)
    # of the device, not of the threads that will turn out best; first, so that a fault here costs no measurement
    bandwidth = devices.copy_bandwidth(device, min(options.threads, cpu.available_threads()))
    processes = measure_in_processes(options, device)
    result = assemble(options, processes, bandwidth)
    publish_json(options.out, result | {"device": devices.describe(device, processes[0]["threads"])})


if __name__ == "__main__":
    run(main)
