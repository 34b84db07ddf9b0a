"""Names of rows and of their ways to decode."""

from collections.abc import Mapping
from typing import Any


def key(row: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Return what identifies a row, or a cell of study.json: model, format and run; None is the default run."""
    return row["model"], row["format"], row.get("run")


def label(row: Mapping[str, Any]) -> str:
    """Return a row's name within its model: FORMAT, or FORMAT@RUN. The reference is a default run."""
    return f"{row['format']}@{row['run']}" if row.get("run") else row["format"]


def rename_run(entry: Any, name: str) -> None:
    """Name the study or the time of a row, a load or a task's entry in its run."""
    entry["run"] = f"{entry['run']}, {name}" if entry.get("run") else name
    entry["missing"].pop("run", None)


def mode_label(mode: str | None) -> str | None:
    """Return the name of a way to decode; it says so if the way is Quantmill's own."""
    return "captured (Quantmill's own CUDA graph)" if mode == "captured" else mode
