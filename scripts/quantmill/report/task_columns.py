"""Columns of a study's tasks, made from the entries of results.json: their names are the study's."""

import re
from typing import Any

from quantmill.report.column import SHARE, Column, set_later
from quantmill.report.rows import Results, Task

SIGNED_SHARE = {"minimum": -1, "maximum": 1}
PLACE = 21  # among the columns that are shown at once, after all others


def column_name(task: str, figure: str) -> str:
    """Return the column of a task's figure; other characters than letters, digits and `_` become `_`."""
    return f"task_{re.sub(r'[^A-Za-z0-9_]', '_', task)}_{figure}"


def of_task(name: str, place: int, entry: Task) -> list[Column]:
    """Return the columns of a task; `entry` is one of its rows' entries, which describes the score."""
    better = "lower" if entry["higher_is_better"] is False else "higher"
    share, signed = (SHARE, SIGNED_SHARE) if entry["share"] else ({}, {})
    of = "share of right answers" if entry["share"] else "NLL in nats a word or byte"

    def column(figure: str, text: str, **more: Any) -> Column:
        words = {"kind": "number", "title": f"{name}, {figure.replace('_', ' ')}"} | more
        return Column(name=column_name(name, figure), text=text, parts=("tasks",), source=set_later, **words)

    return [
        column(
            "score",
            f"{entry['metric'] or 'The metric'} of {name}, as lm-evaluation-harness computes it (METHODS.md, Tasks).",
            title=name,
            better=better,
            shown=PLACE + place,
            limits=share,
        ),
        column("stderr", f"lm-evaluation-harness' own standard error of the score of {name}.", limits=share),
        column(
            "documents",
            f"Documents of {name} that were asked: the study's limit leaves that number of each of its tasks.",
            kind="integer",
        ),
        column(
            "flips",
            f"Share of the documents of {name} that either the row or its reference answers right, and not both.",
            better="lower",
            limits=SHARE,
        ),
        column(
            "difference",
            f"The {of} less that of the model's reference, paired by the documents of {name}.",
            better=better,
            limits=signed,
        ),
        column(
            "difference_low",
            "Lower end of the paired 95% interval of the difference: of shares McNemar's, of NLL a bootstrap.",
            limits=signed,
        ),
        column("difference_high", "Upper end of the same interval.", limits=signed),
        column(
            "verdict",
            f"What the interval of the difference of {name} says: tie where it holds 0; reference in its own row.",
            kind="string",
        ),
    ]


def columns(results: Results) -> list[Column]:
    """Return the columns of the study's tasks, in their order."""
    told: dict[str, Task] = {}
    for entry in results.get("tasks", ()):
        if entry["task"] not in told or told[entry["task"]]["metric"] is None:
            told[entry["task"]] = entry
    return [column for place, (name, entry) in enumerate(told.items()) for column in of_task(name, place, entry)]
