"""Speeds of what people deploy, apart from those that only Quantmill reaches (METHODS.md, What is deployed)."""

from collections.abc import Sequence

from quantmill.report.rows import Mode, Row

NAMES = ("deployed_tokens_per_second", "deployed_tokens_per_second_low", "deployed_tokens_per_second_high")
OWN_ENGINES = {"quantmill-tvm": "MLC-LLM was not run; docs/MLC.md says how"}
CAPTURED = "decoded by Quantmill's CUDA graph; set latency.decode: generate"
LOOP = "decoded by a loop of Quantmill's; set latency.decode: generate"


def why_own(row: Row) -> str | None:
    """Return why a user of the artifact does not get the row's speed; None if he does."""
    if row["tokens_per_second"] is None:
        return None
    if row["engine"] in OWN_ENGINES:
        return OWN_ENGINES[row["engine"]]
    if row["mode"] == "captured":
        return CAPTURED
    on_gpu = (row["device_details"] or {}).get("device") == "cuda"
    return LOOP if row["mode"] == "eager" and on_gpu else None  # recorded before `generate` (METHODS.md)


def mark(rows: Sequence[Row], rank_own: bool) -> None:
    """Set the deployed speed of each row: its own, or that of `generate` if another way was faster.

    `rank_own`: the study asks to rank Quantmill's own speeds like any other.
    """
    for row in rows:
        why = None if rank_own else why_own(row)
        source: Row | Mode | None = row if why is None else generated(row)
        row["deployed_tokens_per_second"] = source and source["tokens_per_second"]
        row["deployed_tokens_per_second_low"] = source and source.get("tokens_per_second_low")
        row["deployed_tokens_per_second_high"] = source and source.get("tokens_per_second_high")
        if row["deployed_tokens_per_second"] is None:
            row["missing"] |= dict.fromkeys(NAMES, why or row["missing"]["tokens_per_second"])


def generated(row: Row) -> Mode | None:
    """Return the figures of the library's own `generate`, measured beside a captured way."""
    if row["engine"] in OWN_ENGINES:
        return None
    ways = (way for way in row["other_modes"] or () if way["mode"] == "generate" and not way["refused"])
    return next((way for way in ways if way["tokens_per_second"] is not None), None)


def speed(row: Row) -> tuple[float, float, float] | None:
    """Return the deployed tokens a second with both ends of its interval; None if it was not measured.

    Of a disturbed row the lower end is a lower bound of the undisturbed speed, and the upper end says nothing.
    """
    rate, low, high = (
        row["deployed_tokens_per_second"],
        row["deployed_tokens_per_second_low"],
        row["deployed_tokens_per_second_high"],
    )
    return None if rate is None or low is None or high is None else (rate, low, high)
