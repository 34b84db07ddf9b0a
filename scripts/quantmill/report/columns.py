"""The table of columns: content, source, display and comparison of each figure of results.csv.

The row, the reasons for empty cells, results.schema.json, results.parquet, the page, the READMEs' tables and
report.compare are all made from `COLUMNS`. A new figure is an entry here, a field of rows.Row, and the function that
computes it in column.py.
"""

import json
from pathlib import Path
from typing import Any

from quantmill.report.column import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Column,
    above_noise_floor,
    device,
    ends,
    group_size,
    of_artifact,
    of_cell,
    of_quality,
    of_speed,
    set_later,
)
from quantmill.report.load_columns import LOAD_COLUMNS

SCHEMA = Path(__file__).with_name("results.schema.json")

LATER: dict[str, Any] = {"source": set_later, "why_missing": ""}

# in the order of results.csv
COLUMNS = [
    of_cell("model", "Name of the model in the study's config.", lambda cell: cell["model"], shown=1),
    of_cell("format", "Name of the format, such as ct2-int8.", lambda cell: cell["format"], shown=2),
    of_cell(
        "run",
        "Name of the run in the study's config: an engine with its options; null for the format's default run.",
        lambda cell: cell.get("run"),
        why_missing="the format's default run",
        shown=3,
    ),
    of_cell("engine", "The engine that runs it, by its registered name.", lambda cell: cell["engine"], shown=4),
    of_speed(
        "device",
        "Name of the processor or GPU that the speed was measured on; null where it was not measured.",
        "string",
        source=device,
        limits={},
    ),
    of_artifact(
        "bits_per_weight",
        "number",
        "Bytes of the files that hold weights, times 8, over the model's number of parameters; null where that "
        "number is not known.",
        lambda artifact: artifact["bits_per_weight"],
        why_missing="its number of parameters is not known",
        unit="bit",
        title="bits per weight",
        better="lower",
        judge="relative",
        limits=NOT_NEGATIVE,
        shown=13,
    ),
    of_artifact(
        "size_bytes",
        "integer",
        "All files of the artifact together, without its manifest.",
        lambda artifact: artifact["bytes"],
        unit="B",
        title="size",
        better="lower",
        judge="relative",
        limits=NOT_NEGATIVE,
        shown=15,
    ),
    of_quality(
        "perplexity",
        "exp of the total negative log-likelihood of the evaluation text over the count of scored tokens or words, "
        "by the protocol of protocol.quality.perplexity (METHODS.md, Perplexity).",
        better="lower",
        judge="paired ratio",
        limits={"minimum": 1},
        shown=7,
    ),
    *ends(
        of_quality,
        "perplexity",
        "the perplexity's 95% interval: bootstrap over windows, how far it would move with other text of this kind "
        "(METHODS.md, Perplexity).",
        limits=NOT_NEGATIVE,
    ),
    of_quality(
        "kld_mean",
        "Mean KL divergence D(reference || candidate) over all scored positions and the whole vocabulary "
        "(METHODS.md, Distance from the reference).",
        unit="nat",
        title="mean KL",
        better="lower",
        judge="paired difference",
        shown=9,
    ),
    of_quality("kld_median", "Median of the same divergence over positions.", unit="nat", better="lower"),
    of_quality("kld_p99", "99th percentile of the same divergence over positions.", unit="nat", better="lower"),
    of_quality(
        "top1_agreement",
        "Share of scored positions where the candidate and the reference put the same token first.",
        title="top-1 agreement",
        better="higher",
        limits=SHARE,
        shown=10,
    ),
    of_speed(
        "ttft_ms_p50",
        "Median time from handing over a prompt's ids to the first token, batch 1 (METHODS.md, Latency).",
        unit="ms",
        title="TTFT",
        better="lower",
        judge="median",
        shown=11,
    ),
    of_speed(
        "tpot_ms_p50",
        "Median over runs of the time a token after the first: (last token - first token) / (tokens - 1).",
        unit="ms",
        title="TPOT",
        better="lower",
        judge="median",
        shown=12,
    ),
    of_speed("tpot_ms_p99", "99th percentile of the same over runs.", unit="ms", title="TPOT p99", better="lower"),
    of_speed(
        "tokens_per_second",
        "Sum of tokens over sum of time, prefill included, batch 1, greedy, a fixed number of new tokens after each "
        "prompt (METHODS.md, Latency).",
        unit="1/s",
        title="tokens/s",
        better="higher",
        judge="interval",
        limits=POSITIVE,
        shown=5,
    ),
    *ends(
        of_speed,
        "tokens_per_second",
        "the 95% interval of tokens_per_second: Student's t over processes, with the prompts' own error (METHODS.md, "
        "The interval of tokens/s).",
        unit="1/s",
        title="tokens/s",
        limits=POSITIVE,
    ),
    of_speed(
        "peak_memory_bytes",
        "Of a CPU the most resident memory of the process that measures, its loading and libraries included; of a "
        "GPU the memory in use on the device after decoding, with what the driver keeps for itself.",
        "integer",
        unit="B",
        title="peak memory",
        better="lower",
        judge="relative",
        shown=16,
    ),
    of_speed(
        "bandwidth_fraction",
        "Bytes of weights that a decoded token reads, times tokens_per_second, over device_bandwidth: the best copy "
        "bandwidth of the device's undisturbed rows; above 1 where a model fits in a cache.",
        title="of the bandwidth",
        better="higher",
        shown=17,
    ),
    Column(
        name="pareto",
        kind="boolean",
        text="Whether no other row of the model and device is significantly better in quality or speed and "
        "significantly worse in neither; null where a disturbed or own speed leaves it open, or the artifact was not "
        "checked (METHODS.md, The Pareto front).",
        parts=("latency", "quality"),
        source=set_later,
        title="Pareto front",
        shown=18,
    ),
    of_artifact(
        "build_s",
        "number",
        "Wall-clock time of building the artifact, without the quality gate; null if another publisher built it.",
        lambda artifact: None if artifact.get("prebuilt") else artifact["build_s"],
        why_missing="not built here",
        unit="s",
        title="build time",
        better="lower",
        limits=NOT_NEGATIVE,
    ),
    of_speed(
        "joules_per_token",
        "Energy that the device took from a run's first token to its last, over the tokens after the first; null "
        "if the device does not report it.",
        why_missing="the device does not report its energy, or the measurement was too short for it",
        unit="J",
        title="energy a token",
        better="lower",
    ),
    of_speed(
        "interference",
        "What may have disturbed the measurement of the speed, in words; empty if nothing did, null if the speed was "
        "not measured. In results.csv joined by '; ', or none.",
        "array",
        source=lambda speed: speed["interference"],
        limits={},
    ),
    of_quality(
        "kld_lower_bound",
        "Lower bound of the mean KL divergence, of an engine that returns only its likeliest tokens: that over these "
        "and all others as one (METHODS.md, Distance from the reference).",
        unit="nat",
        better="lower",
        why_missing="the whole divergence is known (kld_mean), or the engine returns no likeliest tokens",
    ),
    of_quality("kld_p999", "99.9th percentile of the KL divergence over positions.", unit="nat", better="lower"),
    of_quality("kld_max", "Largest KL divergence of any position.", unit="nat", better="lower"),
    Column(
        name="kld_noise_floor",
        kind="number",
        text="Mean KL divergence of the reference from itself in another dtype, on the first windows (METHODS.md, "
        "Noise floor).",
        parts=("noise_floor",),
        source=lambda noise: noise["summary"]["kld_mean"],
        unit="nat",
    ),
    Column(
        name="above_noise_floor",
        kind="boolean",
        text="Whether the row's mean KL divergence over the same windows is above the noise floor; below it, the "
        "format cannot be distinguished from the reference. Of an engine with kld_lower_bound alone: whether that is "
        "above the reference's own in the same engine.",
        parts=("quality", "noise_floor"),
        source=above_noise_floor,
        why_missing="the engine does not report what it follows from",
    ),
    of_quality(
        "delta_p_rms",
        "Root mean square of the change of the right token's probability against the reference.",
        better="lower",
        limits=SHARE,
    ),
    of_quality(
        "nll_difference",
        "Negative log-likelihood less that of the model's reference, over the scored tokens; paired by windows.",
        **LATER,
        unit="nat/token",
        title="NLL over the reference",
        better="lower",
        shown=8,
    ),
    *ends(
        of_quality,
        "nll_difference",
        "the paired 95% interval of nll_difference: the same bootstrap draws of windows for both.",
        **LATER,
        unit="nat/token",
    ),
    of_quality(
        "nll_verdict",
        "What the interval of nll_difference says: tie where it holds 0; reference in the reference's own row.",
        "string",
        **LATER,
        limits={"enum": ["reference", "tie", "worse", "better", None]},
    ),
    of_artifact(
        "group_size",
        "integer",
        "How many weights share a scale: as GPTQ or AWQ was configured or chose, -1 where a whole column shares one; "
        "null of formats without that choice.",
        group_size,
        why_missing="this format has no such choice",
        shown=14,
    ),
    of_speed(
        "deployed_tokens_per_second",
        "tokens_per_second as a user of the artifact gets it: null where only Quantmill's own kernels or way to decode "
        "were measured. Verdict and Pareto front rest on it (METHODS.md, What is deployed).",
        **LATER,
        unit="1/s",
        title="tokens/s, deployed",
        better="higher",
        limits=POSITIVE,
        shown=6,
    ),
    *ends(
        of_speed,
        "deployed_tokens_per_second",
        "its 95% interval; of a disturbed row a lower bound of the undisturbed speed.",
        **LATER,
        unit="1/s",
        limits=POSITIVE,
    ),
]


def figures(part: str) -> list[str]:
    """Return the names of columns that are figures of a part's summary."""
    return [column.name for column in COLUMNS if column.parts == (part,) and column.source is None]


def shown_columns() -> list[Column]:
    """Return the columns that are shown at once, in the order of their places."""
    return sorted((column for column in COLUMNS if column.shown), key=lambda column: column.shown or 0)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of results.json: its file, with the columns of the tables."""
    content = json.loads(SCHEMA.read_text(encoding="utf-8"))
    row, names, load = (content["$defs"][name] for name in ("row", "column", "load"))
    others = {name: load["properties"][name] for name in ("missing", "quantiles", "trials")}
    load["properties"] = {column.name: column.schema() for column in LOAD_COLUMNS} | others
    load["required"] = [name for name in load["properties"] if name != "trials"]
    stale = {*names["enum"], *(column.name for column in COLUMNS)}
    others = {name: each for name, each in row["properties"].items() if name not in stale}
    row["properties"] = {column.name: column.schema() for column in COLUMNS} | others
    row["required"] = [name for name in row["properties"] if name != "memory_at"]  # only if the config asks for it
    names["enum"] = [column.name for column in COLUMNS]
    return content
