"""Longer prompts, and several sequences at once: beside the headline, never in it.

Both take their prompts from the evaluation text's ids (random ids where a model has no tokenizer).
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
    """For each of `prompt_tokens` the raw runs after a prompt of so many ids, or the reason why there are none."""
    found: list[dict[str, Any]] = []
    n = min(task.new_tokens, NEW_TOKENS)
    for length in sorted(task.prompt_tokens):  # a cache that was enlarged stays so, and all of it is read
        entry = {"tokens": length, "new_tokens": n}
        if context and length + n > context:
            found.append(entry | {"skipped": f"with {n} new tokens it exceeds the model's context of {context}"})
            continue
        if length > len(evaluation):
            found.append(entry | {"skipped": f"the evaluation text holds {len(evaluation)} tokens"})
            continue
        ids = evaluation[:length]
        time_tokens(engine, [ids], n)  # its kernels, and a cache of its size
        runs = [time_tokens(engine, [ids], n) for _ in range(task.repeats)]
        entry |= {"runs": raw(runs, task.number), "outputs": [run.tokens for run in runs]}
        if engine.mode != engine.modes[0]:
            entry["largest_gap"] = alignment.largest_gap(engine, ids, entry["outputs"])
        found.append(entry)
    return found


def measure_batches(engine: Engine, task: LatencyTask, evaluation: list[int], length: int) -> list[dict[str, Any]]:
    """For each of `batch_sizes` the raw runs of so many sequences at once, or the reason why there are none.

    Prompts are pieces of the evaluation text that are as long as the longest of the headline's. A batch of 1 alone is
    what the headline measures already.
    """
    if list(task.batch_sizes) == [1]:
        return []
    found: list[dict[str, Any]] = []
    for size in task.batch_sizes:
        entry = {"batch": size, "prompt_tokens": length, "new_tokens": task.new_tokens}
        if size > 1 and "batches" not in engine.capabilities:
            found.append(entry | {"skipped": "this engine decodes one sequence at a time"})
        elif size * length > len(evaluation):
            found.append(entry | {"skipped": f"the evaluation text holds {len(evaluation)} tokens"})
        else:
            prompts = [evaluation[start : start + length] for start in range(0, size * length, length)]
            time_tokens(engine, prompts, task.new_tokens)
            runs = [time_tokens(engine, prompts, task.new_tokens) for _ in range(task.repeats)]
            found.append(entry | {"runs": raw(runs, task.number)})
    return found


def raw(runs: Sequence[Timing], process: int) -> list[dict[str, Any]]:
    """What the result file keeps of runs after one prompt, or one batch."""
    return [{"process": process, "repeat": repeat, "prompt": 0} | run.raw() for repeat, run in enumerate(runs)]


def join(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One length or batch, of all processes: its summary and raw runs, or the reason why it was skipped.

    Tokens a second are those of all sequences together; TPOT is the time of a step.
    """
    first = entries[0]
    if "skipped" in first:
        return dict(first)
    runs = [run for entry in entries for run in entry["runs"]]
    summary = latency.summary(
        [latency.Sample(run["process"], run["repeat"], run["prompt"], tuple(run["token_seconds"])) for run in runs]
    )
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
    """Mark what another way to decode measured after prompts where its tokens are not the plain way's, but for ties."""
    for mine, theirs in zip(lengths, plain, strict=True):
        if "skipped" in mine or mine["largest_gap"] <= alignment.TIE:
            continue
        if mine["output_ids"] != theirs["output_ids"] or not mine["deterministic"]:
            mine["refused"] = f"its tokens differ from the plain way's, by {mine['largest_gap']:.2g} nats"
