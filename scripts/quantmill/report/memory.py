"""Memory of each row at the config's `memory_at`: its weights, and the cache of a number of users with a text each.

results.json holds it in the rows of a study that asks for it, and results.csv, results.parquet and the page have
columns of it, whose titles name the users and their tokens.
"""

from collections.abc import Mapping
from typing import Any

from quantmill.metrics import footprint
from quantmill.report.column import NOT_NEGATIVE, Column, set_later
from quantmill.report.rows import MemoryAt, Results, Row

TOTAL, PARTS = "memory_at_bytes", ("weights_bytes", "kv_cache_bytes")
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


def counted(row: Row, asked: Mapping[str, Any]) -> MemoryAt | None:
    """Return a row's memory if it was counted for these texts; that of another study may be for others."""
    found = row.get("memory_at")
    return found if found and (found["context"], found["users"]) == (asked["context"], asked["users"]) else None


def total(row: Row, asked: Mapping[str, Any]) -> int | None:
    """Return a row's weights and cache together, in bytes; None if one is not known."""
    if not (found := counted(row, asked)):
        return None
    weights, cache = found["weights_bytes"], found["kv_cache_bytes"]
    return None if weights is None or cache is None else weights + cache


def columns(results: Results) -> list[Column]:
    """Return the columns of a study that asks for memory; none of another."""
    asked = results["config"].get("memory_at")
    if not asked:
        return []
    users = f"{asked['users']:,} user{'s' if asked['users'] > 1 else ''} with {asked['context']:,} tokens each"
    heading = title(asked)
    return [
        _column(TOTAL, heading, f"Weights, and keys and values of {users} (METHODS.md, Memory in use).", SHOWN),
        _column(f"memory_at_{PARTS[0]}", f"{heading}: weights", "Its weights: all of them, as the engine loads them."),
        _column(
            f"memory_at_{PARTS[1]}",
            f"{heading}: cache",
            f"Its cache: keys and values of {users}, as the engine keeps them.",
        ),
    ]


def _column(name: str, heading: str, text: str, shown: int | None = None) -> Column:
    """Describe a figure in bytes."""
    return Column(
        name=name,
        kind="integer",
        text=text,
        parts=("latency",),
        source=set_later,
        unit="B",
        title=heading,
        better="lower",
        shown=shown,
        limits=NOT_NEGATIVE,
    )


def values(row: Row, asked: Mapping[str, Any]) -> tuple[dict[str, int | None], str | None]:
    """Return a row's figures by their columns, and why some are missing."""
    if not (found := counted(row, asked)):
        return dict.fromkeys((TOTAL, *(f"memory_at_{part}" for part in PARTS))), ELSEWHERE
    weights, cache = found["weights_bytes"], found["kv_cache_bytes"]
    figures = {TOTAL: total(row, asked), f"memory_at_{PARTS[0]}": weights, f"memory_at_{PARTS[1]}": cache}
    return figures, found["reason"]


def fits(row: Row, asked: Mapping[str, Any] | None) -> bool:
    """Return whether a row is known to fit the config's budget of memory, if it has one."""
    if not asked or "budget_gb" not in asked:
        return True
    needed = total(row, asked)
    return needed is not None and needed <= asked["budget_gb"] * GB
