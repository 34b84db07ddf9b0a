"""Measure how fast an engine decodes one artifact: batch 1, greedy, a fixed number of tokens after each prompt.

    python scripts/quantmill latency.measure ARTIFACT OUT --engine transformers --prompts prompts.json
        --evaluation evaluation.json --latency LATENCY

LATENCY is JSON, the study's config of that name (config/README.md). Each of its `processes` is a fresh process: it
loads the artifact and warms up by the longest prompt and the beginning of the others. It then decodes every prompt
`repeats` times, and after that prompts of `prompt_tokens` tokens and batches of `batch_sizes`, cut from the evaluation
text. On a CPU another process first finds how many threads decode fastest: small models lose more time at the threads'
barriers than they gain. With `decode: captured`, other ways to decode that the engine has (`captured`: Quantmill's CUDA
graph) run in processes of their own. They count only if their tokens are the same, except for ties. The time of a token
is when it arrives on the host. OUT is a JSON file with every raw time, the summary (TTFT, TPOT, tokens/s with its
interval), memory, energy, interference, and the device's copy bandwidth, measured here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from quantmill import devices, engines
from quantmill.common import manifest
from quantmill.common.atomic import work_folder, write_json
from quantmill.common.program import UserError, parser
from quantmill.devices import listeners
from quantmill.devices.fresh_process import run_task
from quantmill.devices.monitor import Monitor
from quantmill.latency import variants, worker
from quantmill.latency.job import LatencyTask, Protocol
from quantmill.latency.worker import Measurement, Refusal
from quantmill.metrics import METRICS_VERSION, latency
from quantmill.quality import alignment
from quantmill.tokens.files import Tokens


@dataclass(frozen=True)
class Observation:
    """A process's measurement, and its surroundings meanwhile (`devices.monitor`)."""

    measured: Measurement
    conditions: dict[str, Any]
    interference: list[str]


def check_length(job: LatencyTask) -> None:
    """Raise `UserError` if a prompt and its new tokens exceed the model's context, which not every engine checks."""
    text = Tokens.read(job.prompts)
    longest = max(len(prompt.ids) for prompt in text.prompts) + job.protocol.new_tokens
    if text.context and longest > text.context:
        raise UserError(
            f"{job.artifact}: longest prompt + new tokens = {longest} exceeds its context of {text.context}; "
            "lower latency.new_tokens, or shorten the prompts"
        )


def best_threads(job: LatencyTask) -> int:
    """Return the number of CPU threads that decodes fastest, at most the task's. A process of its own tries them, so
    that the memory of the trials is not in the measured one."""
    (most,) = job.threads
    candidates = [most] if job.device == "cuda" else sorted({1, (most + 1) // 2, most})
    return most if len(candidates) == 1 else run_task(worker.COMMAND, replace(job, threads=candidates))


def measure(job: LatencyTask) -> Observation | Refusal:
    """Measure in a fresh process, and sample the device meanwhile."""
    with Monitor(job.device, listeners.of_options(job.options)) as monitor:
        found: Measurement | Refusal = run_task(worker.COMMAND, job)
    if isinstance(found, Refusal):
        return found
    load = asdict(found.load) if found.load else None
    return Observation(found, **monitor.describe(load, found.measured, found.decode_phases, found.own))


def measure_way(job: LatencyTask) -> list[Observation] | Refusal:
    """Run all processes of one way to decode, one after another."""
    way = []
    for number in range(job.protocol.processes):
        found = measure(replace(job, number=number))
        if isinstance(found, Refusal):
            return found
        way.append(found)
    return way


def measure_all(job: LatencyTask) -> tuple[list[list[Observation]], list[Refusal]]:
    """Measure every way to decode, the plain way first. Return those that fit the model, and the others' refusals."""
    job = replace(job, threads=[best_threads(job)])
    plain = measure_way(job)
    if isinstance(plain, Refusal):
        return [], [plain]
    modes = plain[0].measured.modes[1:] if job.protocol.decode == "captured" else []
    others = [measure_way(replace(job, mode=mode)) for mode in modes]
    ways = [plain, *(way for way in others if not isinstance(way, Refusal))]
    return ways, [way for way in others if isinstance(way, Refusal)]


def speculates(options: Mapping[str, Any]) -> bool:
    """Return whether an engine's options ask for speculation: the names of vLLM's and SGLang's begin so."""
    return any(name.startswith("spec") for name in options)


def summarise(processes: Sequence[Observation], bandwidth: float, speculation: bool = False) -> dict[str, Any]:
    """Summarise one way to decode: raw samples, figures, and the tokens after each prompt.

    Args:
        bandwidth: of a copy, bytes per second.
        speculation: tokens with the same time are of one step, which reads the weights once. Without speculation they
            came in one message of a server.
    """
    measured = [each.measured for each in processes]
    first = measured[0]
    runs = [run for each in measured for run in each.runs]
    samples = variants.samples(runs)
    figures = latency.summary(samples)
    memory: dict[str, int] = {}
    for kind in first.memory_bytes:
        known = [bytes_ for each in measured if (bytes_ := each.memory_bytes[kind]) is not None]
        memory |= {kind: max(known)} if known else {}
    joules = [each.conditions["decode_joules"] for each in processes]
    decoded = sum(len(sample.token_seconds) - 1 for sample in samples)
    tokens = decoded + len(samples)
    pairs = (pair for sample in samples for pair in pairwise(sample.token_seconds))
    together = sum(before == after for before, after in pairs) if speculation else 0
    read = first.weight_bytes_per_token and first.weight_bytes_per_token * (tokens - together) / tokens
    summary = {
        **figures,
        "peak_memory_bytes": memory.get("device", memory.get("resident")),
        "bandwidth_fraction": read and read * figures["tokens_per_second"] / bandwidth,
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
    """Describe where one way's tokens first differ from the plain way's; None if they do not differ."""
    for prompt, (mine, theirs) in enumerate(zip(one["outputs"], plain["outputs"], strict=True), 1):
        for place, (token, expected) in enumerate(zip(mine, theirs, strict=True), 1):
            if token != expected:
                return f"its tokens differ from those of {plain['mode']} after prompt {prompt}, from token {place} on"
    return None


def judge(one: dict[str, Any], plain: dict[str, Any]) -> dict[str, str | None]:
    """Judge one way by the plain one: `refused` is why it does not count, `differs` where the two part at a tie."""
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
    job: LatencyTask, measured: Sequence[list[Observation]], refusals: Sequence[Refusal], bandwidth: float
) -> dict[str, Any]:
    """Assemble the result file: the protocol and every way to decode. The fastest way that counts is at the top level,
    and the others are in `other_modes`. Without any, `reason` says why."""
    text, protocol = Tokens.read(job.prompts), asdict(job.protocol)
    del protocol["decode"]  # `mode` says how each row was decoded
    warm_up = f"the longest prompt, full length, and {worker.WARM_UP_TOKENS} tokens after each, in every process"
    facts = {
        "kind": "latency",
        "metrics_version": METRICS_VERSION,
        "artifact": manifest.read(job.artifact),
        "engine": job.engine,
        "options": job.options,
        "gpus": job.gpus,
        "protocol": {
            "batch": 1,
            "decoding": "greedy, end-of-sequence disabled",
            "prompts_sha256": text.text_sha256,
            "warm_up": warm_up,
            **protocol,
        },
    }
    if not measured:
        return facts | {"summary": None, "reason": refusals[0].refused}
    plain, first = measured[0], measured[0][0].measured
    ways = [summarise(processes, bandwidth, speculates(job.options)) for processes in measured]
    ways = [way | judge(way, ways[0]) for way in ways]
    for way in ways[1:]:
        variants.refuse_differences(way["lengths"], ways[0]["lengths"])
    best = max((way for way in ways if not way["refused"]), key=lambda way: way["summary"]["tokens_per_second"])
    return {
        **facts,
        "copy_bandwidth_bytes_per_second": bandwidth,
        "prompts": [
            {"text": prompt.text, "tokens": len(prompt.ids)}
            | ({"output_ids": [], "output_text": output} if isinstance(output, str) else {"output_ids": output})
            for prompt, output in zip(text.prompts, best["outputs"], strict=True)
        ],
        "batches": [variants.join(entries) for entries in zip(*(each.measured.batches for each in plain), strict=True)],
        "device": devices.describe(job.device, first.threads),
        "compute_type": first.compute_type,
        "weight_bytes_per_token": first.weight_bytes_per_token,
        "footprint": first.footprint and asdict(first.footprint),
        **({"unchecked": first.unchecked} if first.unchecked else {}),
        **{key: value for key, value in best.items() if key not in ("outputs", "refused")},
        "other_modes": [*(way for way in ways if way is not best), *map(asdict, refusals)],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("out", type=Path)
    engines.add_arguments(arguments)
    arguments.add_argument("--prompts", type=Path, required=True, help="written by tokens.tokenize_texts")
    arguments.add_argument("--evaluation", type=Path, required=True, help="written by tokens.tokenize_texts")
    arguments.add_argument("--latency", type=engines.parse_options, required=True, help="JSON: the config of that name")
    options = arguments.parse_args()

    device = devices.resolve(options.device, gpus=options.gpus)
    manifest.read_unchanged(options.artifact)  # refuses what is not an artifact before any work
    job = LatencyTask(
        artifact=options.artifact,
        engine=options.engine,
        options=options.options,
        gpus=options.gpus,
        device=device,
        threads=[options.threads],
        prompts=options.prompts,
        evaluation=options.evaluation,
        protocol=Protocol(**options.latency),
    )
    check_length(job)
    # of the device, not of the threads that will turn out best; first, so that a fault here costs no measurement
    bandwidth = devices.copy_bandwidth(device, options.threads)
    with work_folder(options.out):
        measured, refusals = measure_all(job)
    write_json(options.out, assemble(job, measured, refusals, bandwidth))
