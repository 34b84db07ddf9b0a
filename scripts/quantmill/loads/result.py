"""The result of one load over all starts of a server: figures, findings, and distributions for the page."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from quantmill.client.checks import Finding
from quantmill.loads.server_start import LoadResult, Start
from quantmill.metrics import restarts, serving, steadiness
from quantmill.metrics.goodput import slo_attainment

# faults of single requests: the server does not sustain such a rate, but the other rates stay valid
MISSES = {"rejected", "failed", "cut", "error_inside"}
# faults of tokens, which the search for the goodput does not check: those of the loads before it count
OF_TOKENS = {"batch_dependent", "unlike_predictions"}


def join(loads: Sequence[LoadResult], alone: Sequence[Finding], limits: Mapping[str, float]) -> dict[str, Any]:
    """Join one load of all starts.

    Args:
        alone: findings about the server before any load.
        limits: `ttft_ms` and `tpot_ms`, which good requests meet.
    """
    planned, runs = loads[0].planned, [each.timelines for each in loads]
    served, missing = serving.summary(runs, planned.slots)
    figures: dict[str, float | None] = {**served}
    met = [slo_attainment(run, limits["ttft_ms"] / 1000, limits["tpot_ms"] / 1000) for run in runs]
    figures["slo_attainment"] = sum(good for good, _ in met) / sum(arrived for _, arrived in met)
    if "output_tokens_per_second" in figures:
        _, low, high = restarts.throughput(runs, planned.slots)
        figures |= {"output_tokens_per_second_low": low, "output_tokens_per_second_high": high}
    equal = [each.equal for each in loads if each.equal is not None]
    figures["tokens_equal_solo"] = equal[0] if equal else None
    figures |= _server_counts(loads)
    joules, tokens = [each.conditions["decode_joules"] for each in loads], _tokens(loads)
    figures["joules_per_token"] = sum(joules) / tokens if None not in joules and tokens else None
    figures["client_cpu_fraction"] = max(each.client["cpu_fraction"] for each in loads)
    figures["schedule_lag_ms_p99"] = max(each.client["schedule_lag_ms_p99"] for each in loads)
    findings = _unique([*alone, *(finding for each in loads for finding in each.findings)])
    return {
        "load": planned.name,
        "slots": planned.slots,
        "rate": planned.rate,
        "schedule_sha256": planned.schedule_sha256,
        "prompt_tokens": _range([len(each.prompt) for each in planned.asked]),
        "new_tokens": _range([each.new_tokens for each in planned.asked]),
        "figures": figures,
        "missing": missing,
        "findings": [finding._asdict() for finding in findings],
        "interference": [*_reasons(loads), *unsteady(runs, planned.slots)],
        "client": [each.client for each in loads],
        "counters": [each.counters for each in loads],
        "conditions": [each.conditions for each in loads],
        "quantiles": _quantiles(runs, planned.slots),
    }


def goodput(start: Start) -> dict[str, Any] | None:
    """Return the goodput of the search, and the findings that refuse it; None without a search."""
    if start.goodput is None:
        return None
    searched = (finding for each in start.searched for finding in each.findings if finding.fault not in MISSES)
    findings = [finding for finding in (*start.findings, *searched) if finding.refuses]
    findings += [finding for each in start.loads for finding in each.findings if finding.fault in OF_TOKENS]
    return start.goodput._asdict() | {
        "trials": [trial._asdict() for trial in start.goodput.trials],
        "findings": [each._asdict() for each in _unique(findings)],
        "interference": _reasons(start.searched),
    }


def raw(starts: Sequence[Start]) -> dict[str, np.ndarray]:
    """Return all times by `LOAD/START/NAME`: intended, sent, end, outcome and events of each request, and the times and
    tokens of all events in a row. Times are seconds from the load's first request on."""
    arrays: dict[str, np.ndarray] = {}
    for number, start in enumerate(starts):
        for place, loaded in enumerate([*start.loads, *start.searched]):
            name = f"{loaded.planned.name}/{number}" + (f"/{place}" if place >= len(start.loads) else "")
            begin = min(each.intended for each in loaded.timelines)
            sent = [np.nan if each.sent is None else each.sent for each in loaded.timelines]
            arrays |= {
                f"{name}/intended": np.array([each.intended for each in loaded.timelines]) - begin,
                f"{name}/sent": np.array(sent) - begin,
                f"{name}/end": np.array([each.end for each in loaded.timelines]) - begin,
                f"{name}/events": np.array([len(each.times) for each in loaded.timelines], dtype=np.int64),
                f"{name}/times": np.array([time for each in loaded.timelines for time in each.times]) - begin,
                f"{name}/tokens": np.array([count for each in loaded.timelines for count in each.tokens]),
                f"{name}/outcome": np.array([each.outcome for each in loaded.timelines]),
            }
    return arrays


def _server_counts(loads: Sequence[LoadResult]) -> dict[str, float | None]:
    """Sum the server's own counters over all starts; None if one start lacks a counter."""

    def total(name: str) -> float | None:
        values = [each.counters[name] for each in loads]
        return None if None in values else sum(value for value in values if value is not None)

    prompts, cached, drafted, accepted = map(total, ("prompt_tokens", "cached_tokens", "drafted", "accepted"))
    events = sum(each.events for each in loads)
    return {
        "preemptions": total("preemptions"),
        "cached_token_fraction": cached / prompts if cached is not None and prompts else None,
        "acceptance": accepted / drafted if accepted is not None and drafted else None,
        "tokens_per_event": _tokens(loads) / events if events else None,
    }


def _tokens(loads: Sequence[LoadResult]) -> float:
    return sum(count for each in loads for timeline in each.timelines for count in timeline.tokens)


def _reasons(loads: Sequence[LoadResult]) -> list[str]:
    """Return each reason of interference once."""
    return list(dict.fromkeys(reason for each in loads for reason in each.interference))


def unsteady(runs: Sequence[Sequence[serving.Timeline]], slots: int | None) -> list[str]:
    """Describe a part of the time in which the machine was slower, found by the load's own tokens."""
    spans = serving.windows(runs, slots)
    if slots is None or min(span.seconds for span in spans) <= 0:
        return []
    part = steadiness.uneven_tokens(runs, spans)
    return [f"not steady: {str(part).replace('of its runs', 'of its time')}"] if part else []


def _unique(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first finding of each fault; those that refuse come first."""
    found: dict[str, Finding] = {}
    for each in sorted(findings, key=lambda each: not each.refuses):
        found.setdefault(each.fault, each)
    return list(found.values())


def _range(values: Sequence[int]) -> list[int]:
    return [min(values), max(values)]


def _quantiles(runs: Sequence[Sequence[serving.Timeline]], slots: int | None) -> dict[str, list[float]]:
    """Return quantiles of TTFT and of the gaps between events, in ms, at `serving.LEVELS`, over the requests that
    `serving.summary` uses. A figure without values is left out."""
    good = serving.answered_within(runs, serving.windows(runs, slots))
    gaps = [(later - earlier) * 1000 for each in good for earlier, later in pairwise(each.times)]
    values = {"ttft_ms": serving.samples(good)["ttft_ms"], "itl_ms": gaps}
    return {name: np.quantile(found, serving.LEVELS).tolist() for name, found in values.items() if found}
