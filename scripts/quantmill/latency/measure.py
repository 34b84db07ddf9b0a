"""Measure how fast an engine decodes one artifact: batch 1, greedy, a fixed number of tokens after each prompt.

    python scripts/quantmill latency.measure ARTIFACT OUT --engine transformers --prompts prompts.json

Each of --processes fresh processes loads the artifact, decodes the longest prompt and the beginning of the others to
warm up, and then every prompt --repeats times; then prompts of --prompt-tokens tokens and batches of --batch-sizes, cut
from --evaluation. On a CPU a process before them tries how many threads decode fastest: small models lose far more at
the threads' barriers than they win. Where the engine has other ways to decode (captured: in Quantmill's CUDA graph),
each has processes of its own, and counts only if its tokens are the same, but for ties. A token's time is when it was
on the host. OUT is a JSON file with every raw time, the summary (TTFT, TPOT, tokens/s with its interval), memory,
energy, what disturbed the measurement, and the device's copy bandwidth, measured here.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from quantmill import devices, engines
from quantmill.common import manifest
from quantmill.common.atomic import work_folder, write_json
from quantmill.common.program import UserError, parser, start_child
from quantmill.devices import cpu, listeners
from quantmill.devices.monitor import Monitor
from quantmill.latency import variants, worker
from quantmill.latency.job import LatencyTask
from quantmill.latency.worker import Measurement, Refusal, Trial
from quantmill.metrics import METRICS_VERSION, latency
from quantmill.quality import alignment
from quantmill.tokens.files import Tokens


@dataclass(frozen=True)
class Observation:
    """What one process measured, and what it measured under (`devices.monitor`)."""

    measured: Measurement
    conditions: dict[str, Any]
    interference: list[str]


def check_length(options: argparse.Namespace) -> None:
    """Refuse prompts and new tokens that together exceed the model's context, whether the engine minds or not."""
    text = Tokens.read(options.prompts)
    longest = max(len(prompt.ids) for prompt in text.prompts) + options.new_tokens
    if text.context and longest > text.context:
        raise UserError(
            f"{options.artifact}: longest prompt + new tokens = {longest} exceeds its context of {text.context}; "
            "lower latency.new_tokens, or shorten the prompts"
        )


def run_job(job: LatencyTask, folder: Path) -> dict[str, Any]:
    """What a fresh process found. Where it fails, its own line says why.

    Its engine is told how many threads it has; the environment does not say otherwise.
    """
    path = folder / "job.json"
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    with start_child([*worker.COMMAND, path], env=cpu.environment()) as child:
        status = child.wait()
    if status < 0:
        raise UserError(f"{job.artifact}: its process was killed by signal {-status}; was memory short?")
    if status:
        sys.exit(status)
    return json.loads(Path(job.out).read_text(encoding="utf-8"))


def try_threads(job: LatencyTask, candidates: list[int], folder: Path) -> int:
    """The number of CPU threads that decodes fastest, found by a process of its own: what the trials leave is no memory
    of the measured one."""
    if len(candidates) == 1:
        return candidates[0]
    return Trial(**run_job(replace(job, task="try_threads", threads=candidates), folder)).threads


def measure(job: LatencyTask, folder: Path) -> Observation | Refusal:
    """Run a process that measures, and watch the device meanwhile."""
    with Monitor(job.device, listeners.of_options(job.options)) as monitor:
        found = run_job(job, folder)
    if "refused" in found:
        return Refusal(**found)
    measured = Measurement(**found)
    seen = monitor.describe(measured.load, measured.measured, measured.decode_phases, measured.own)
    return Observation(measured, **seen)


def measure_all(job: LatencyTask, processes: int, modes: str) -> list[list[Observation] | Refusal]:
    """All processes of each way to decode, the plain way first, one process after the other; a way that does not fit
    the model says why."""
    with work_folder(Path(job.out)) as folder:
        job = replace(job, out=str(folder / "process.json"))
        (most,) = job.threads
        candidates = [most] if job.device == "cuda" else sorted({1, (most + 1) // 2, most})
        job = replace(job, threads=[try_threads(job, candidates, folder)])
        first = measure(job, folder)
        if isinstance(first, Refusal):
            raise UserError(f"{job.artifact}: {job.engine} cannot decode it: {first.refused}")
        ways: list[list[Observation] | Refusal] = []
        for mode in first.measured.modes[: 1 if modes == "generate" else None]:
            one = first if mode == first.measured.mode else measure(replace(job, mode=mode), folder)
            if isinstance(one, Refusal):
                ways.append(one)
                continue
            numbers = range(1, processes)
            ways.append([one, *(measure(replace(job, mode=mode, number=number), folder) for number in numbers)])
        return ways


def speculates(options: Mapping[str, Any]) -> bool:
    """Whether an engine's options ask for speculation: vLLM's and SGLang's begin so."""
    return any(name.startswith("spec") for name in options)


def summarise(processes: Sequence[Observation], bandwidth: float, speculation: bool = False) -> dict[str, Any]:
    """What one way to decode came to: raw samples, summary, and the tokens after each prompt.

    Args:
        bandwidth: of a copy, bytes per second.
        speculation: several tokens at one time are those of one step, which reads the weights once. Elsewhere they are
            those of one message of a server.
    """
    measured = [each.measured for each in processes]
    first = measured[0]
    runs = [run for each in measured for run in each.runs]
    samples = [latency.Sample(r["process"], r["repeat"], r["prompt"], tuple(r["token_seconds"])) for r in runs]
    summary = latency.summary(samples)
    memory = {
        kind: max(each.memory_bytes[kind] for each in measured)
        for kind, bytes_ in first.memory_bytes.items()
        if bytes_ is not None
    }
    joules = [each.conditions["decode_joules"] for each in processes]
    decoded = sum(len(sample.token_seconds) - 1 for sample in samples)
    tokens = decoded + len(samples)
    pairs = (pair for sample in samples for pair in pairwise(sample.token_seconds))
    together = sum(before == after for before, after in pairs) if speculation else 0
    read = first.weight_bytes_per_token and first.weight_bytes_per_token * (tokens - together) / tokens
    summary |= {
        "peak_memory_bytes": memory.get("device", memory.get("resident")),
        "bandwidth_fraction": read and read * summary["tokens_per_second"] / bandwidth,
        "joules_per_token": None if None in joules else sum(joules) / decoded,
    }
    outputs: list[list[Any]] = [
        [written for each in measured for written in (each.texts or each.outputs)[number]]
        for number in range(len(first.outputs))
    ]
    gaps = [each.largest_gaps for each in measured if each.largest_gaps]
    unsteady = latency.unsteadiness(samples)
    return {
        "mode": first.mode,
        "summary": summary,
        "interference": [
            *(f"{reason} (process {number})" for number, each in enumerate(processes) for reason in each.interference),
            *([unsteady] if unsteady else []),
        ],
        "conditions": [each.conditions for each in processes],
        "memory_bytes": memory,
        "deterministic": all(tokens == group[0] for group in outputs for tokens in group),
        "outputs": [group[0] for group in outputs],
        "largest_gaps": gaps and [max(each) for each in zip(*gaps, strict=True)],
        "versions": first.versions,
        "load_seconds": [each.load_seconds for each in measured],
        "lengths": [variants.join(entries) for entries in zip(*(each.lengths for each in measured), strict=True)],
        "runs": runs,
    }


def difference(one: dict[str, Any], plain: dict[str, Any]) -> str | None:
    """Where one way's tokens first differ from the plain way's; None where none does."""
    for prompt, (mine, theirs) in enumerate(zip(one["outputs"], plain["outputs"], strict=True), 1):
        for place, (token, expected) in enumerate(zip(mine, theirs, strict=True), 1):
            if token != expected:
                return f"its tokens differ from those of {plain['mode']} after prompt {prompt}, from token {place} on"
    return None


def judge(one: dict[str, Any], plain: dict[str, Any]) -> dict[str, str | None]:
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


def assemble(
    options: argparse.Namespace, measured: Sequence[list[Observation] | Refusal], bandwidth: float
) -> dict[str, Any]:
    """The result file: protocol, and every way to decode; the fastest that counts stands first, in the file itself."""
    refusals = [asdict(way) for way in measured if isinstance(way, Refusal)]
    plain, *others = (way for way in measured if not isinstance(way, Refusal))
    ways = [summarise(processes, bandwidth, speculates(options.options)) for processes in (plain, *others)]
    ways = [way | judge(way, ways[0]) for way in ways]
    for way in ways[1:]:
        variants.refuse_differences(way["lengths"], ways[0]["lengths"])
    best = max((way for way in ways if not way["refused"]), key=lambda way: way["summary"]["tokens_per_second"])
    text, first = Tokens.read(options.prompts), plain[0].measured
    return {
        "kind": "latency",
        "metrics_version": METRICS_VERSION,
        "artifact": manifest.read(options.artifact),
        "engine": options.engine,
        "options": options.options,
        "gpus": options.gpus,
        "protocol": {
            "batch": 1,
            "decoding": "greedy, end-of-sequence disabled",
            "prompts_sha256": text.text_sha256,
            "new_tokens": options.new_tokens,
            "repeats": options.repeats,
            "processes": options.processes,
            "warm_up": (
                f"the longest prompt, full length, and {worker.WARM_UP_TOKENS} tokens after each, in every process"
            ),
            "prompt_tokens": options.prompt_tokens,
            "batch_sizes": options.batch_sizes,
        },
        "copy_bandwidth_bytes_per_second": bandwidth,
        "prompts": [
            {"text": prompt.text, "tokens": len(prompt.ids)}
            | ({"output_ids": [], "output_text": output} if isinstance(output, str) else {"output_ids": output})
            for prompt, output in zip(text.prompts, best["outputs"], strict=True)
        ],
        "batches": [variants.join(entries) for entries in zip(*(each.measured.batches for each in plain), strict=True)],
        "compute_type": first.compute_type,
        "weight_bytes_per_token": first.weight_bytes_per_token,
        **({"unchecked": first.unchecked} if first.unchecked else {}),
        **{key: value for key, value in best.items() if key not in ("outputs", "refused")},
        "other_modes": [*(way for way in ways if way is not best), *refusals],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("out", type=Path)
    engines.add_arguments(arguments)
    arguments.add_argument("--prompts", type=Path, required=True, help="what tokens.tokenize_texts wrote")
    arguments.add_argument("--new-tokens", type=int, default=200)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--processes", type=int, default=3)
    arguments.add_argument(
        "--decode",
        choices=["generate", "captured"],
        default="captured",
        help="captured: beside generate, where it can be",
    )
    arguments.add_argument("--evaluation", type=Path, help="what tokens.tokenize_texts wrote; the next two cut from it")
    arguments.add_argument("--prompt-tokens", type=int, nargs="*", default=[], help="lengths of longer prompts")
    arguments.add_argument("--batch-sizes", type=int, nargs="*", default=[1], help="sequences decoded together")
    options = arguments.parse_args()

    device = devices.resolve(options.device, gpus=options.gpus)
    manifest.read_unchanged(options.artifact)  # refuses what is no artifact before any work
    check_length(options)
    # of the device, not of the threads that will turn out best; first, so that a fault here costs no measurement
    bandwidth = devices.copy_bandwidth(device, options.threads)
    job = LatencyTask(
        task="measure",
        out=str(options.out),
        artifact=str(options.artifact),
        engine=options.engine,
        options=options.options,
        gpus=options.gpus,
        device=device,
        threads=[options.threads],
        prompts=str(options.prompts),
        evaluation=options.evaluation and str(options.evaluation),
        new_tokens=options.new_tokens,
        repeats=options.repeats,
        prompt_tokens=options.prompt_tokens,
        batch_sizes=options.batch_sizes,
    )
    measured = measure_all(job, options.processes, options.decode)
    result = assemble(options, measured, bandwidth)
    write_json(options.out, result | {"device": devices.describe(device, measured[0][0].measured.threads)})
