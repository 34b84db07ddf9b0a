"""What rows and their ways to decode are called."""

from collections.abc import Mapping
from typing import Any


def key(row: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """What a row, or a cell of study.json, is known by: model, format and run; None is the format's default run."""
    return row["model"], row["format"], row.get("run")


def label(row: Mapping[str, Any]) -> str:
    """A row within its model: FORMAT, or FORMAT@RUN. The reference's is the format's name: it is a default run."""
    return f"{row['format']}@{row['run']}" if row.get("run") else row["format"]


def mode_label(mode: str | None) -> str | None:
    """A way to decode, in words that say so where it is not the engine's own."""
    return "captured (Quantmill's own CUDA graph)" if mode == "captured" else mode
