#!/usr/bin/env python3
"""Measure how fast an engine decodes one artifact: batch 1, greedy, a fixed number of tokens after each prompt.

    python scripts/latency.py ARTIFACT OUT --engine transformers --prompts prompts.json

Each of --processes fresh processes loads the artifact, decodes the longest prompt and the beginning of the others to
warm up, and then every prompt --repeats times; then prompts of --prompt-tokens tokens and batches of --batch-sizes, cut
from --evaluation. On a CPU a process before them tries how many threads decode fastest: small models lose far more at
the threads' barriers than they win. Where the engine has other ways to decode (captured in a CUDA graph), each has
processes of its own, and counts only if its tokens are the same, but for ties. A token's time is when it was on the
host. OUT is a JSON file with every raw time, the summary (TTFT, TPOT, tokens/s with its interval), memory, energy, what
disturbed the measurement, and the device's copy bandwidth, measured here.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import devices
from common import manifest
from common.program import UserError, parser, run, start_child
from common.publish import publish_json, work_folder
from devices import cpu
from devices.monitor import Monitor
from metrics import METRICS_VERSION, latency
from scoring import alignment
from timing import process, variants


def check_length(options: argparse.Namespace) -> None:
    """Refuse prompts and new tokens that together exceed the model's context, whether the engine minds or not."""
    content = json.loads(options.prompts.read_text(encoding="utf-8"))
    longest = max(len(prompt["ids"]) for prompt in content["prompts"]) + options.new_tokens
    if content["context"] and longest > content["context"]:
        raise UserError(
            f"{options.artifact}: longest prompt + new tokens = {longest} exceeds its context of {content['context']}; "
            "lower latency.new_tokens, or shorten the prompts"
        )


def measure_apart(
    options: argparse.Namespace, device: str, number: int, mode: str | None, threads: list[int]
) -> dict[str, Any]:
    """Run this program as one process that measures, and watch the device. Where it fails, its own line says why."""
    with work_folder(options.out) as folder:
        out = folder / "process.json"
        command = [sys.executable, *sys.argv, "--process", str(number), "--process-out", str(out)]
        command += ["--process-threads", *map(str, threads), *(["--process-mode", mode] if mode else [])]
        with Monitor(device) as monitor, start_child(command) as child:
            status = child.wait()
        if status < 0:
            raise UserError(f"{options.artifact}: its process was killed by signal {-status}; was memory short?")
        if status:
            sys.exit(status)
        found = json.loads(out.read_text(encoding="utf-8"))
        if "measured" not in found:  # a trial, or a way to decode that does not fit
            return found
        return found | monitor.observed(found["load"], found["measured"], found["decode_phases"])


def measure_all(options: argparse.Namespace, device: str) -> list[list[dict[str, Any]]]:
    """All processes of each way to decode, the plain way first, one process after the other; a way that does not fit
    the model has one process, which says why."""
    most = min(options.threads, cpu.available_threads())
    threads = [most] if device == "cuda" else sorted({1, (most + 1) // 2, most})
    if len(threads) > 1:
        threads = [measure_apart(options, device, 0, None, threads)["threads"]]
    first = measure_apart(options, device, 0, None, threads)
    modes = first["modes"][:1] if options.decode == "eager" else first["modes"]
    ways = []
    for mode in modes:
        one = first if mode == first["mode"] else measure_apart(options, device, 0, mode, threads)
        others = range(1, 1 if "refused" in one else options.processes)
        ways.append([one, *(measure_apart(options, device, number, mode, threads) for number in others)])
    return ways


def summarise(processes: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """What one way to decode came to: raw samples, summary, and the tokens after each prompt."""
    runs = [run for each in processes for run in each["runs"]]
    samples = [latency.Run(r["process"], r["repeat"], r["prompt"], tuple(r["token_seconds"])) for r in runs]
    summary = latency.summary(samples)
    memory = {
        kind: max(each["memory_bytes"][kind] for each in processes)
        for kind, bytes_ in processes[0]["memory_bytes"].items()
        if bytes_ is not None
    }
    joules = [each["conditions"]["decode_joules"] for each in processes]
    decoded = sum(len(sample.token_seconds) - 1 for sample in samples)
    summary |= {
        "peak_memory_bytes": memory.get("device", memory["resident"]),
        "bandwidth_fraction": processes[0]["weight_bytes_per_token"] * summary["tokens_per_second"] / bandwidth,
        "joules_per_token": None if None in joules else sum(joules) / decoded,
    }
    outputs = [
        [tokens for each in processes for tokens in each["outputs"][number]]
        for number in range(len(processes[0]["outputs"]))
    ]
    gaps = [each["largest_gaps"] for each in processes if each["largest_gaps"]]
    return {
        "mode": processes[0]["mode"],
        "summary": summary,
        "interference": [
            f"{reason} (process {number})" for number, each in enumerate(processes) for reason in each["interference"]
        ],
        "conditions": [each["conditions"] for each in processes],
        "memory_bytes": memory,
        "deterministic": all(tokens == group[0] for group in outputs for tokens in group),
        "outputs": [group[0] for group in outputs],
        "largest_gaps": gaps and [max(each) for each in zip(*gaps, strict=True)],
        "versions": processes[0]["versions"],
        "load_seconds": [each["load_seconds"] for each in processes],
        "lengths": [variants.joined(entries) for entries in zip(*(each["lengths"] for each in processes), strict=True)],
        "runs": runs,
    }


def difference(one: dict[str, Any], plain: dict[str, Any]) -> str | None:
    """Where one way's tokens first differ from the plain way's; None where none does."""
    for prompt, (mine, theirs) in enumerate(zip(one["outputs"], plain["outputs"], strict=True), 1):
        for place, (token, expected) in enumerate(zip(mine, theirs, strict=True), 1):
            if token != expected:
                return f"its tokens differ from {plain['mode']} ones after prompt {prompt}, from token {place} on"
    return None


def judged(one: dict[str, Any], plain: dict[str, Any]) -> dict[str, str | None]:
    """Whether one way counts beside the plain one: `refused` says why not, `differs` where the two parted at a tie."""
    if one is plain:
        return {"refused": None, "differs": None}
    where = difference(one, plain)
    if not where and not one["deterministic"]:
        where = "its tokens differ from run to run"
    gap = max(one["largest_gaps"] or [0.0])
    if where and gap > alignment.TIE:
        return {"refused": f"{where}, by up to {gap:.2g} nats", "differs": where}
    return {"refused": None, "differs": where and f"{where}: a tie, within {gap:.1g} nats"}


def assemble(options: argparse.Namespace, measured: list[list[dict[str, Any]]], bandwidth: float) -> dict[str, Any]:
    """The result file: protocol, and every way to decode; the fastest that counts stands first, in the file itself."""
    unfit = [processes[0] for processes in measured if "refused" in processes[0]]
    ways = [summarise(processes, bandwidth) for processes in measured if "refused" not in processes[0]]
    ways = [way | judged(way, ways[0]) for way in ways]
    for way in ways[1:]:
        variants.refuse_differences(way["lengths"], ways[0]["lengths"])
    best = max((way for way in ways if not way["refused"]), key=lambda way: way["summary"]["tokens_per_second"])
    content = json.loads(options.prompts.read_text(encoding="utf-8"))
    prompts, plain = content["prompts"], measured[0]
    return {
        "kind": "latency",
        "metrics_version": METRICS_VERSION,
        "artifact": manifest.read(options.artifact),
        "engine": options.engine,
        "protocol": {
            "batch": 1,
            "decoding": "greedy, end-of-sequence disabled",
            "prompts_sha256": content["text_sha256"],
            "new_tokens": options.new_tokens,
            "repeats": options.repeats,
            "processes": options.processes,
            "warm_up": (
                f"the longest prompt, full length, and {process.WARM_UP_TOKENS} tokens after each, in every process"
            ),
            "prompt_tokens": options.prompt_tokens,
            "batch_sizes": options.batch_sizes,
        },
        "copy_bandwidth_bytes_per_second": bandwidth,
        "prompts": [
            {"text": prompt["text"], "tokens": len(prompt["ids"]), "output_ids": output}
            for prompt, output in zip(prompts, best["outputs"], strict=True)
        ],
        "batches": [variants.joined(entries) for entries in zip(*(each["batches"] for each in plain), strict=True)],
        **{key: plain[0][key] for key in ("compute_type", "weight_bytes_per_token")},
        **{key: value for key, value in best.items() if key not in ("outputs", "refused")},
        "other_modes": [*(way for way in ways if way is not best), *unfit],
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
    arguments.add_argument("--evaluation", type=Path, help="what tokenize_texts.py wrote; the next two cut from it")
    arguments.add_argument("--prompt-tokens", type=int, nargs="*", default=[], help="lengths of longer prompts")
    arguments.add_argument("--batch-sizes", type=int, nargs="*", default=[1], help="sequences decoded together")
    arguments.add_argument("--process", type=int, help=argparse.SUPPRESS)  # this program's own calls of itself
    arguments.add_argument("--process-out", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--process-mode", help=argparse.SUPPRESS)
    arguments.add_argument("--process-threads", type=int, nargs="+", help=argparse.SUPPRESS)
    options = arguments.parse_args()

    device = devices.resolve(options.device)
    if options.process is not None:
        publish_json(options.process_out, process.measure(options, device))
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
