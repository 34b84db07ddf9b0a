"""Longer prompts and batches, which are never in a row's own figures.

Both take their prompts from the ids of the evaluation text, or random ids for a model without a tokenizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmill.engines import Engine
from quantmill.latency.decoding import Timing, time_tokens
from quantmill.latency.job import LatencyTask
from quantmill.metrics import latency
from quantmill.quality import alignment

NEW_TOKENS = 64  # after a long prompt, at most: enough for TPOT, and TTFT is what its length costs


def measure_lengths(
    engine: Engine, task: LatencyTask, evaluation: list[int], context: int | None
) -> list[dict[str, Any]]:
    """Return for each length of `prompt_tokens` the raw runs after such a prompt, or the reason why it is skipped."""
    found: list[dict[str, Any]] = []
    n = min(task.protocol.new_tokens, NEW_TOKENS)
    for length in sorted(task.protocol.prompt_tokens):  # in order: an enlarged cache stays large, and is read whole
        entry: dict[str, Any] = {"tokens": length, "new_tokens": n}
        if context and length + n > context:
            entry["skipped"] = f"with {n} new tokens it exceeds the model's context of {context}"
        elif length > len(evaluation):
            entry["skipped"] = f"the evaluation text holds {len(evaluation)} tokens"
        else:
            ids = evaluation[:length]
            runs = time_runs(engine, [ids], n, task)
            entry |= {"runs": raw(runs, task.number), "outputs": [run.tokens for run in runs]}
            if engine.mode != engine.modes[0]:
                entry["largest_gap"] = alignment.largest_gap(engine, ids, entry["outputs"])
        found.append(entry)
    return found


def measure_batches(engine: Engine, task: LatencyTask, evaluation: list[int], length: int) -> list[dict[str, Any]]:
    """Return for each of `batch_sizes` the raw runs of that many sequences, or the reason why it is skipped.

    Prompts are pieces of the evaluation text of `length` tokens, the row's longest prompt. A batch of 1 alone is not
    measured: the row's own figures are of one sequence.
    """
    protocol = task.protocol
    found: list[dict[str, Any]] = []
    for size in protocol.batch_sizes if list(protocol.batch_sizes) != [1] else []:
        entry: dict[str, Any] = {"batch": size, "prompt_tokens": length, "new_tokens": protocol.new_tokens}
        if size > 1 and "batches" not in engine.capabilities:
            entry["skipped"] = "this engine decodes one sequence at a time"
        elif size * length > len(evaluation):
            entry["skipped"] = f"the evaluation text holds {len(evaluation)} tokens"
        else:
            prompts = [evaluation[start : start + length] for start in range(0, size * length, length)]
            entry["runs"] = raw(time_runs(engine, prompts, protocol.new_tokens, task), task.number)
        found.append(entry)
    return found


def time_runs(engine: Engine, prompts: list[list[int]], n: int, task: LatencyTask) -> list[Timing]:
    """Time the runs of n tokens after `prompts`. One run before them loads kernels and enlarges the cache."""
    time_tokens(engine, prompts, n)
    return [time_tokens(engine, prompts, n) for _ in range(task.protocol.repeats)]


def raw(runs: Sequence[Timing], process: int) -> list[dict[str, Any]]:
    """Return runs after one prompt, or of one batch, as the result file keeps them."""
    return [{"process": process, "repeat": repeat, "prompt": 0} | run.raw() for repeat, run in enumerate(runs)]


def samples(runs: Sequence[Mapping[str, Any]]) -> list[latency.Sample]:
    """Return runs of the result file as the metrics take them."""
    return [latency.Sample(run["process"], run["repeat"], run["prompt"], tuple(run["token_seconds"])) for run in runs]


def join(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join one length or batch of all processes: summary and raw runs, or the reason why it is skipped.

    Tokens/s are of all sequences together; TPOT is the time of a step.
    """
    first = entries[0]
    if "skipped" in first:
        return dict(first)
    runs = [run for entry in entries for run in entry["runs"]]
    summary = latency.summary(samples(runs))
    size = first.get("batch", 1)
    summary |= {name: value * size for name, value in summary.items() if name.startswith("tokens_per_second")}
    if "tokens" in first:
        summary["prefill_tokens_per_second"] = first["tokens"] / summary["ttft_ms_p50"] * 1000
    kept = {name: value for name, value in first.items() if name not in ("runs", "outputs")}
    if "outputs" in first:
        outputs = [tokens for entry in entries for tokens in entry["outputs"]]
        kept |= {"output_ids": outputs[0], "deterministic": all(tokens == outputs[0] for tokens in outputs)}
    if "largest_gap" in first:
        kept["largest_gap"] = max(entry["largest_gap"] for entry in entries)
    return kept | summary | {"runs": runs}


def refuse_differences(lengths: Sequence[dict[str, Any]], plain: Sequence[Mapping[str, Any]]) -> None:
    """Mark as refused each length after which another way's tokens differ from the plain way's beyond ties."""
    for mine, theirs in zip(lengths, plain, strict=True):
        if "skipped" in mine or mine["largest_gap"] <= alignment.TIE:
            continue
        if mine["output_ids"] != theirs["output_ids"] or not mine["deterministic"]:
            mine["refused"] = f"its tokens differ from the plain way's, by {mine['largest_gap']:.2g} nats"
