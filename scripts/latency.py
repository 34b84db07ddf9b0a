#!/usr/bin/env python3
"""Measure how fast an engine decodes one artifact: batch 1, greedy, a fixed number of tokens after each prompt.

    python scripts/latency.py ARTIFACT OUT --engine transformers --prompts prompts.json

Each of --processes fresh processes loads the artifact, decodes the longest prompt and the beginning of the others to
warm up, and then every prompt --repeats times. On a CPU the first process also tries how many threads decode fastest:
small models lose far more at the threads' barriers than they win. Where the engine has other ways to decode (captured
in a CUDA graph), each has processes of its own, and counts only if its tokens are the same. A token's time is when it
was on the host. OUT is a JSON file with every raw time, the summary (TTFT, TPOT, tokens/s with its interval), memory,
and the device's copy bandwidth, measured here.
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

WARM_UP_TOKENS = 2  # after each prompt
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
    engine.mode = options.process_mode or engine.modes[0]
    load_seconds = time.perf_counter() - started
    runs, outputs = [], [[] for _ in prompts]
    total = 1 + options.repeats * len(prompts)
    with tqdm(total=total, desc=f"{engine.mode}, process {options.process}", mininterval=1) as bar:
        timed_tokens(engine, max(prompts, key=len), options.new_tokens)
        for ids in prompts:  # libraries choose and load kernels for each length that they meet
            timed_tokens(engine, ids, WARM_UP_TOKENS)
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
        "modes": engine.modes,
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


def measure_apart(options: argparse.Namespace, process: int, mode: str | None, threads: list[int]) -> dict[str, Any]:
    """Run this program as one process that measures. Where it fails, its own line says why."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "process.json"
        command = [sys.executable, *sys.argv, "--process", str(process), "--process-out", str(out)]
        command += ["--process-threads", *map(str, threads), *(["--process-mode", mode] if mode else [])]
        status = subprocess.run(command).returncode
        if status < 0:
            raise UserError(f"{options.artifact}: its process was killed by signal {-status}; was memory short?")
        if status:
            sys.exit(status)
        return json.loads(out.read_text(encoding="utf-8"))


def measure_all(options: argparse.Namespace, device: str) -> list[list[dict[str, Any]]]:
    """All processes of each way to decode, the plain way first, one process after the other."""
    most = min(options.threads, cpu.available_threads())
    first = measure_apart(options, 0, None, [most] if device == "cuda" else sorted({1, (most + 1) // 2, most}))
    modes = first["modes"][:1] if options.decode == "eager" else first["modes"]
    return [
        [
            first
            if mode == first["mode"] and process == 0
            else measure_apart(options, process, mode, [first["threads"]])
            for process in range(options.processes)
        ]
        for mode in modes
    ]


def summarise(processes: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """What one way to decode came to: raw samples, summary, and the tokens after each prompt."""
    runs = [each for process in processes for each in process["runs"]]
    samples = [latency.Run(r["process"], r["repeat"], r["prompt"], tuple(r["token_seconds"])) for r in runs]
    summary = latency.summary(samples)
    summary |= {
        "peak_memory_bytes": max(process["peak_memory_bytes"] for process in processes),
        "bandwidth_fraction": processes[0]["weight_bytes_per_token"] * summary["tokens_per_second"] / bandwidth,
    }
    outputs = [
        [tokens for process in processes for tokens in process["outputs"][number]]
        for number in range(len(processes[0]["outputs"]))
    ]
    return {
        "mode": processes[0]["mode"],
        "summary": summary,
        "deterministic": all(tokens == group[0] for group in outputs for tokens in group),
        "outputs": [group[0] for group in outputs],
        "versions": processes[0]["versions"],
        "load_seconds": [process["load_seconds"] for process in processes],
        "runs": runs,
    }


def difference(one: dict[str, Any], plain: dict[str, Any]) -> str | None:
    """Where one way's tokens first differ from the plain way's, so that it does not count; None where none does."""
    for prompt, (mine, theirs) in enumerate(zip(one["outputs"], plain["outputs"], strict=True), 1):
        for place, (token, expected) in enumerate(zip(mine, theirs, strict=True), 1):
            if token != expected:
                return f"its tokens differ from {plain['mode']} ones after prompt {prompt}, from token {place} on"
    return None


def assemble(options: argparse.Namespace, measured: list[list[dict[str, Any]]], bandwidth: float) -> dict[str, Any]:
    """The result file: protocol, and every way to decode; the fastest that counts stands first, in the file itself."""
    ways = [summarise(processes, bandwidth) for processes in measured]
    ways = [way | {"refused": difference(way, ways[0])} for way in ways]
    best = max((way for way in ways if not way["refused"]), key=lambda way: way["summary"]["tokens_per_second"])
    prompts = json.loads(options.prompts.read_text(encoding="utf-8"))["prompts"]
    first = measured[0][0]
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
            "warm_up": f"the longest prompt, full length, and {WARM_UP_TOKENS} tokens after each, in every process",
        },
        "copy_bandwidth_bytes_per_second": bandwidth,
        "prompts": [
            {"text": prompt["text"], "tokens": len(prompt["ids"]), "output_ids": output}
            for prompt, output in zip(prompts, best["outputs"], strict=True)
        ],
        **{key: first[key] for key in ("compute_type", "weight_bytes_per_token")},
        **{key: value for key, value in best.items() if key not in ("outputs", "refused")},
        "other_modes": [way for way in ways if way is not best],
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
    arguments.add_argument(
        "--decode", choices=["eager", "captured"], default="captured", help="captured: beside eager, where it can be"
    )
    arguments.add_argument("--process", type=int, help=argparse.SUPPRESS)  # this program's own calls of itself
    arguments.add_argument("--process-out", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--process-mode", help=argparse.SUPPRESS)
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
    measured = measure_all(options, device)
    result = assemble(options, measured, bandwidth)
    publish_json(options.out, result | {"device": devices.describe(device, measured[0][0]["threads"])})


if __name__ == "__main__":
    run(main)
