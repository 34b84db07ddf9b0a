"""Memory of each row at the config's `memory_at`: its weights, and the cache of a number of users with a text each.

results.json holds it in the rows of a study that asks for it, and results.csv, results.parquet and the page have
columns of it, whose titles name the users and their tokens.
"""

from collections.abc import Mapping
from typing import Any

from quantmill.metrics import footprint
from quantmill.report.column import NOT_NEGATIVE, Column, set_later
from quantmill.report.rows import MemoryAt, Results, Row

TOTAL, WEIGHTS, CACHE = "memory_at_bytes", "memory_at_weights_bytes", "memory_at_kv_cache_bytes"
SHOWN = 19  # place among the columns that are shown at once
GB = 10**9  # as sizes are shown
OLDER = "its speed was measured before Quantmill recorded what its engine keeps; measure it again"
UNTOLD = "its engine does not report what its weights and its cache take"
NO_CACHE = "Quantmill does not know what this engine keeps of this model's tokens"
ELSEWHERE = "it was counted for another number of tokens or users"


def count(asked: Mapping[str, Any], speed: Mapping[str, Any] | None, why: str | None) -> MemoryAt:
    """Return a row's memory by its latency result; `why`: why it has none."""
    found = MemoryAt(
        context=asked["context"], users=asked["users"], weights_bytes=None, kv_cache_bytes=None, reason=None
    )
    said = (speed or {}).get("footprint")
    if said is None:
        found["reason"] = why if speed is None else UNTOLD if "footprint" in speed else OLDER
        return found
    held = footprint.read(said)
    found["weights_bytes"] = held.weight_bytes
    if held.cache:
        found["kv_cache_bytes"] = held.cache.nbytes(asked["context"], asked["users"])
    else:
        found["reason"] = NO_CACHE
    return found


def words(asked: Mapping[str, Any]) -> str:
    """Describe what memory is counted for."""
    return f"{asked['context']:,} tokens and {asked['users']:,} user{'s' if asked['users'] > 1 else ''}"


def title(asked: Mapping[str, Any]) -> str:
    """Return the title of the column."""
    users = f"{asked['users']:,} x " if asked["users"] > 1 else ""
    return f"memory, {users}{asked['context']:,} tokens"


def columns(results: Results) -> list[Column]:
    """Return the columns of a study that asks for memory; none of another."""
    if not (asked := results["config"].get("memory_at")):
        return []
    heading, of = title(asked), words(asked)
    told = {
        TOTAL: (heading, f"Weights and cache, with {of} (METHODS.md, Memory in use)."),
        WEIGHTS: (f"{heading}: weights", "All weights, as the engine loads them."),
        CACHE: (f"{heading}: cache", f"Keys and values as the engine keeps them, with {of}."),
    }
    return [
        Column(
            name=name,
            kind="integer",
            text=text,
            parts=("latency",),
            source=set_later,
            unit="B",
            title=heading,
            better="lower",
            shown=SHOWN if name == TOTAL else None,
            limits=NOT_NEGATIVE,
        )
        for name, (heading, text) in told.items()
    ]


def values(row: Row, asked: Mapping[str, Any]) -> tuple[dict[str, int | None], str | None]:
    """Return a row's figures in bytes by their columns, and why some are missing: those of another study may have been
    counted for other texts."""
    found = row.get("memory_at")
    if not found or (found["context"], found["users"]) != (asked["context"], asked["users"]):
        return dict.fromkeys((TOTAL, WEIGHTS, CACHE)), ELSEWHERE
    weights, cache = found["weights_bytes"], found["kv_cache_bytes"]
    both = None if weights is None or cache is None else weights + cache
    return {TOTAL: both, WEIGHTS: weights, CACHE: cache}, found["reason"]


def total(row: Row, asked: Mapping[str, Any]) -> int | None:
    """Return a row's weights and cache together, in bytes; None if one is not known."""
    return values(row, asked)[0][TOTAL]


def fits(row: Row, asked: Mapping[str, Any] | None) -> bool:
    """Return whether a row is known to fit the config's budget of memory, if it has one."""
    if not asked or "budget_gb" not in asked:
        return True
    needed = total(row, asked)
    return needed is not None and needed <= asked["budget_gb"] * GB
