"""Rows of results.json, and cells of study.json, of which they are made: names and types of their fields.

At run time they are the JSON itself, which results.schema.json describes. `value_of` reads any column by its name.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class Named(TypedDict):
    """The name of a row, a cell, a load or a task's entry: `run` is None for the format's default run."""

    model: str
    format: str
    run: NotRequired[str | None]


class Cell(Named):
    """A cell of study.json: what a row is made of, as paths of files. `logs`: of each part, upstream first."""

    engine: str
    options: NotRequired[dict[str, Any]]
    gpus: NotRequired[int]
    prebuilt: NotRequired[bool]
    artifact: str
    latency: str | None
    quality: str | None
    noise_floor: str | None
    loads: NotRequired[str | None]
    tasks: NotRequired[str | None]
    evaluation: NotRequired[str]
    prompts: NotRequired[str]
    absent: dict[str, str]
    logs: dict[str, list[str]]
    pending: NotRequired[list[str]]
    outdated: NotRequired[list[str]]


class Study(TypedDict):
    """study.json. `options`: those of Snakemake, for the commands that the page shows."""

    config: dict[str, Any]
    cells: list[Cell]
    options: str


class Ratio(TypedDict):
    """A perplexity over the reference's, with its paired 95% interval; a tie if that holds 1."""

    ratio: float
    low: float
    high: float
    tie: bool


class Windows(TypedDict):
    """Sums of each window of the evaluation text. `counts`: what the headline divides by."""

    nll: list[float]
    tokens: list[int]
    counts: list[float]
    kld: NotRequired[list[float]]


class Mode(TypedDict):
    """Another way to decode than the row's own. Figures are None if it wrote nothing."""

    mode: str
    refused: str | None
    differs: str | None
    tokens_per_second: float | None
    tokens_per_second_low: NotRequired[float | None]
    tokens_per_second_high: NotRequired[float | None]
    bandwidth_fraction: float | None


class Variant(TypedDict, total=False):
    """A longer prompt of `tokens`, or a batch, measured beside the row's figures."""

    tokens: int
    batch: int
    skipped: str
    refused: str | None
    ttft_ms_p50: float
    tpot_ms_p50: float
    tokens_per_second: float


class Loop(TypedDict):
    """A text that repeats `period` tokens from `token` to its end; both count from 1."""

    prompt: int
    token: int
    period: int
    reference_too: bool | None


class AgainstReference(TypedDict):
    """Prompts after which the reference loops, and the paired 95% interval of the difference of the shares."""

    prompts: int
    difference_low: float
    difference_high: float


class Degenerate(TypedDict):
    """Texts that fall into a loop. `reference` is None if there is nothing to compare with."""

    prompts: int
    of: int
    first_token: int | None
    loops: list[Loop]
    reference: AgainstReference | None


class Protocols(TypedDict):
    latency: dict[str, Any] | None
    quality: dict[str, Any] | None


class Bandwidth(TypedDict):
    bytes_per_second: float
    disturbed: bool


class MemoryAt(TypedDict):
    """Memory of a row with texts of `context` tokens of `users` users. `reason`: why a figure is missing."""

    context: int
    users: int
    weights_bytes: int | None
    kv_cache_bytes: int | None
    reason: str | None


class Row(TypedDict):
    """The fields of a row that code names: first columns of results.csv, then what goes beyond them."""

    model: str
    format: str
    run: str | None
    engine: str
    device: str | None
    bits_per_weight: float | None
    size_bytes: int | None
    perplexity: float | None
    kld_mean: float | None
    tokens_per_second: float | None
    tokens_per_second_low: float | None
    tokens_per_second_high: float | None
    bandwidth_fraction: float | None
    pareto: bool | None
    interference: list[str] | None
    kld_lower_bound: float | None
    above_noise_floor: bool | None
    nll_difference: float | None
    nll_difference_low: float | None
    nll_difference_high: float | None
    nll_verdict: str | None
    deployed_tokens_per_second: float | None
    deployed_tokens_per_second_low: float | None
    deployed_tokens_per_second_high: float | None

    options: dict[str, Any]
    gpus: int
    prebuilt: bool
    dominated_by: list[str] | None
    degenerate: Degenerate | None
    warnings: list[str]
    device_bandwidth: Bandwidth | None
    compute_type: str | None
    mode: str | None
    differs: str | None
    other_modes: list[Mode] | None
    versions: dict[str, str] | None
    threads: int | None
    missing: dict[str, str]
    protocol: Protocols
    latency_summary: dict[str, Any] | None
    lengths: list[Variant] | None
    batches: list[Variant] | None
    quality_windows: Windows | None
    quality_totals: dict[str, Any] | None
    device_details: dict[str, Any] | None
    copy_bandwidth_bytes_per_second: float | None
    artifact: dict[str, Any] | None
    perplexity_ratio: Ratio | None
    memory_at: NotRequired[MemoryAt]


class Load(Named):
    """A row of a server under one load: the columns of loads.csv that code names, and its distributions."""

    engine: str
    load: str | None
    refused: str | None
    missing: dict[str, str]
    quantiles: dict[str, list[float]]
    trials: NotRequired[list[list[float]]]
    default_run: NotRequired[str]


class Task(Named):
    """A row's score in a task of lm-evaluation-harness, and its answers paired with the reference's."""

    task: str
    metric: str | None
    score: float | None
    stderr: float | None
    higher_is_better: bool | None
    share: bool | None
    missing: dict[str, str]


class Results(TypedDict):
    """results.json."""

    schema_version: int
    metrics_version: int
    units: dict[str, str]
    config: dict[str, Any]
    rows: list[Row]
    tasks: NotRequired[list[Task]]
    loads: NotRequired[list[Load]]


def value_of(row: Mapping[str, object], column: str) -> Any:
    """Return a row's figure by the name of its column."""
    return row[column]
