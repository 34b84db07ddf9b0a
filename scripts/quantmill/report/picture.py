"""The pictures: the plots of perplexity over speed and of what is lost over bits per weight, with a label beside every
point.

Vega places the points, label_placement.py where their labels go.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import vl_convert

from quantmill.report import plot
from quantmill.report.label_placement import Box, places

SPEED, SIZE = ("perplexity", "tokens_per_second"), ("perplexity_loss", "bits_per_weight")  # quality and cost
LABELS = 40  # rows; more labels than that hide the plot
STEPS = 20  # boxes that a line of the front is made of
Marks = list[tuple[str, list[dict[str, Any]]]]


def drawn(specification: Mapping[str, Any]) -> Marks:
    """Return what a Vega specification draws within its axes: each mark's type, and its items with their pixels."""
    found: Marks = []

    def walk(group: Mapping[str, Any]) -> None:
        for mark in group["items"]:
            if mark["marktype"] != "group":
                found.append((mark["marktype"], mark["items"]))
            elif mark["role"] not in ("axis", "legend", "title"):
                for inner in mark["items"]:
                    walk(inner)

    walk(vl_convert.vega_to_scenegraph(specification)["scenegraph"]["items"][0])
    return found


def boxes(marks: Marks) -> list[Box]:
    """Return what no label may cover: points, bars, lines, and the word in the better corner."""
    found: list[Box] = []
    for kind, items in marks:
        if kind == "symbol":
            found += [(each["x"] - 6, each["y"] - 6, each["x"] + 6, each["y"] + 6) for each in items]
        elif kind == "rule":  # an interval, along either axis
            for each in items:
                (left, right), (top, bottom) = (sorted((each[axis], each.get(f"{axis}2", each[axis]))) for axis in "xy")
                found.append((left - 1, top - 1, right + 1, bottom + 1))
        elif kind == "text":  # which begins or ends at its place
            for each in items:
                left = each["x"] - (80 if each.get("align") == "right" else 0)
                found.append((left, each["y"] - 26, left + 80, each["y"]))
        else:
            for one, other in pairwise(items):
                for i in range(STEPS):
                    x, y = (one[axis] + i / STEPS * (other[axis] - one[axis]) for axis in "xy")
                    found.append((x - 1, y - 1, x + 1, y + 1))
    return found


def mark(kind: str, **values: Any) -> dict[str, Any]:
    """Return a Vega mark with these values."""
    return {"type": kind, "encode": {"update": {name: {"value": value} for name, value in values.items()}}}


def specification(quality: str, cost: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the picture of the rows of `axes.points` that have both figures, in Vega."""
    rows = [row for row in rows if row[quality] is not None and row[cost] is not None]
    chart = plot.chart(quality, cost, rows, picture=True)
    found = vl_convert.vegalite_to_vega(chart.to_dict(), vl_version=plot.VERSION)
    one = len({row["model"] for row in rows}) == 1
    texts = [row["cell"] if one else row["label"] for row in rows]
    if 0 < len(texts) <= LABELS:
        marks = drawn(found)
        points = [(each["x"], each["y"]) for kind, items in marks if kind == "symbol" for each in items]
        chosen = places(points, texts, boxes(marks), (found["width"], found["height"]))
        for (x, y), text, place in zip(points, texts, chosen, strict=True):
            if place.line:
                found["marks"].insert(0, mark("rule", x=x, y=y, x2=place.line[0], y2=place.line[1], stroke=plot.GREY))
            written = {"align": place.align, "baseline": "middle", "fontSize": 12}
            found["marks"].append(mark("text", x=place.x, y=place.y, text=text, **written))
    return found
