"""The quality-versus-cost plots: Vega-Lite through Altair, compiled to Vega, which can place labels beside one another.

One specification an axis pair, which the page fills with its rows. The pictures, quality-speed and quality-size, are
two of them with their data and a legend of engines: Vega places labels on a canvas, which only a browser has, so
picture.py places those. drawing.py compiles and draws.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import altair as alt
import vl_convert

from quantmill.common.atomic import write_atomically
from quantmill.common.cache_folder import cache
from quantmill.common.program import UserError
from quantmill.report.axes import INTERVALS, MORE_IS_BETTER, SIZES, costs, is_task, qualities, smallest

# Okabe and Ito's palette, distinguishable with every common colour blindness; grey for its black, seen on black too
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C"]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-left", "triangle-right"]
VERSION = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])  # of Vega-Lite, as Altair and vl_convert name it
DATA = "rows"
# of labels
ANCHORS = ["right", "left", *(f"{side}{end}" for side in ("top", "bottom") for end in ("-right", "-left", ""))]
GOOD = "#2E8B57"  # of the word in the better corner, legible on white and on black
GREY = "#888888"
SYMLOG = {"kld_mean": 1e-4, "perplexity_loss": 1e-3}  # below which the scale is linear
TICKS = {
    "perplexity_loss": [0, *(sign * n * 10.0**e for e in range(-3, 5) for n in (1, 3) for sign in (1, -1))],
    "bits_per_weight": [1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32],
}
SHARES = {"perplexity_loss": ".3~%", "top1_agreement": ".1%"}  # and how their ticks are written


def cycle(scale: Sequence[str], rows: Sequence[Mapping[str, Any]], name: str) -> alt.Scale:
    """Return a scale that assigns its values in turn, cyclically, to those of `name`, in the table's order."""
    names = list(dict.fromkeys(row[name] for row in rows))
    return alt.Scale(domain=names, range=[scale[i % len(scale)] for i in range(len(names))])


def colours(rows: Sequence[Mapping[str, Any]], name: str = "cell", title: str = "format") -> alt.Color:
    """Return a colour for each format and run, or other values of `name`, in the table's order."""
    return alt.Color(f"{name}:N", title=title, scale=cycle(PALETTE, rows, name))


def better_corner(quality: str, cost: str) -> alt.Chart:
    """Draw the word "better" in the corner where both axes are at their best, with an arrow into it."""
    right, top = cost in MORE_IS_BETTER, quality in MORE_IS_BETTER or is_task(quality)
    arrow = ("\u2197" if top else "\u2198") if right else ("\u2196" if top else "\u2199")
    mark = alt.Chart(alt.Data(values=[{}])).mark_text(
        text=f"better {arrow}" if right else f"{arrow} better",
        align="right" if right else "left",
        baseline="top" if top else "bottom",
        dx=-6 if right else 6,
        dy=6 if top else -6,
        fontSize=14,
        fontWeight="bold",
        color=GOOD,
    )
    across, up = alt.XValue("width" if right else 0), alt.YValue(0 if top else "height")
    return mark.encode(x=across, y=up).properties(name="corner")


def chart(quality: str, cost: str, rows: Sequence[Mapping[str, Any]], *, picture: bool = False) -> alt.LayerChart:
    """Draw quality over a cost: points with 95% intervals if there are any, the front as a line, rooflines as ticks.

    A row of `axes.points` is drawn if it has both figures. Rows of a model whose `front` is true are joined. Disturbed
    speeds and Quantmill's own are pale, except over sizes, which do not depend on them. Over sizes and in pictures,
    colours and a legend show engines. `picture`: with its data and a fixed width.
    """
    sized, models = cost in SIZES, list(dict.fromkeys(row["model"] for row in rows))
    fronts = smallest(rows, quality, cost) if sized else [row["pareto"] for row in rows]
    values = [{**row, "front": front} for row, front in zip(rows, fronts, strict=True)]
    base = alt.Chart(alt.Data(values=values) if picture else alt.NamedData(DATA))
    base = base.transform_filter(f"isValid(datum.{quality}) && isValid(datum.{cost})")
    (across, across_scale), (up, up_scale) = costs(rows)[cost], qualities(rows)[quality]
    options = {"constant": SYMLOG[quality]} if up_scale == "symlog" else {}
    x = alt.X(f"{cost}:Q", title=across, scale=alt.Scale(type=across_scale, nice=False, padding=36))
    x.axis = alt.Axis(format="~s", labelOverlap=True, **ticks(cost))
    y = alt.Y(f"{quality}:Q", title=up, scale=alt.Scale(type=up_scale, zero=False, nice=False, padding=28, **options))
    y.axis = alt.Axis(format=SHARES.get(quality, ".1%" if is_task(quality) else "~g"), **ticks(quality))
    one, of_engines = len(models) == 1, sized or picture
    colour = colours(rows, "engine", "engine") if of_engines else colours(rows)
    shaped = "engine" if of_engines and one else "model"
    shape = alt.Shape(f"{shaped}:N", title=shaped, scale=cycle(SHAPES, rows, shaped))
    legend = alt.Legend(symbolOpacity=1, orient="bottom", columns=7 if picture else 3)
    colour.legend = legend if of_engines else None
    shape.legend = legend if (of_engines if one else picture) else None
    lines = [alt.Detail(f"{name}:N") for name in (("model",) if sized else ("model", "device"))]
    front = (
        base.transform_filter("datum.front")
        .mark_line(strokeDash=[4, 4], color=GREY)
        .encode(x=x, y=y, detail=lines, order=alt.Order(f"{cost}:Q"))
    )
    layers = [better_corner(quality, cost), front]  # channels by their types: Altair takes long to infer them
    if cost in INTERVALS:
        bar = base.mark_rule(strokeWidth=2).encode(
            x=alt.X(f"{cost}_low:Q"), x2=alt.X2(f"{cost}_high:Q"), y=y, color=colour
        )
        limit = base.transform_filter("isValid(datum.roofline) && rooflines").mark_tick(
            orient="vertical", thickness=3, size=20
        )
        layers += [bar, limit.encode(x=alt.X("roofline:Q"), y=y, color=colour).properties(name="rooflines")]
    if quality in INTERVALS:
        bar = base.mark_rule(strokeWidth=2).encode(
            y=alt.Y(f"{quality}_low:Q"), y2=alt.Y2(f"{quality}_high:Q"), x=x, color=colour
        )
        layers.append(bar)
    tooltip = [alt.Tooltip("model:N"), alt.Tooltip("cell:N", title="format")]
    tooltip += [alt.Tooltip(f"{name}:N") for name in ("engine", "compute_type", "device")]
    ends = {name: ("", "_low", "_high") if name in INTERVALS else ("",) for name in (quality, cost)}
    tooltip += [alt.Tooltip(f"{name}{end}:Q", format=".4~g") for name, each in ends.items() for end in each]
    faint = {} if sized else {"condition": {"test": "datum.pale", "value": 0.35}}
    points = base.mark_point(filled=True, size=70 if of_engines else 110).encode(
        x=x, y=y, color=colour, shape=shape, tooltip=tooltip, opacity=alt.OpacityValue(1, **faint)
    )
    title = {"title": heading(rows, models, sized)} if picture else {}
    return (
        alt.layer(*layers, points.properties(name="points"))
        .add_params(alt.param(name="rooflines", value=False))
        .properties(width=820 if picture else "container", height=520 if picture else 400, **title)
        .configure_axis(labelFontSize=12, titleFontSize=13, gridOpacity=0.4)
        .configure_view(stroke=None)
    )


def heading(rows: Sequence[Mapping[str, Any]], models: Sequence[str], sized: bool) -> alt.TitleParams:
    """Return the title of a picture."""
    if not sized:
        told = {"disturbed": "disturbed, so at least as fast", "own": "Quantmill's own speed"}
        reasons = [said for name, said in told.items() if any(row[name] for row in rows)]
        note = f"pale: {' or '.join(reasons)}" if reasons else ""
        return alt.TitleParams(note, fontSize=12, fontWeight="normal", anchor="end")
    whose = f"{models[0]}: what" if len(models) == 1 else "What"
    note = "Dashed: no smaller format loses less. Bars: 95% intervals."
    note = note if models else "No perplexity was measured but the reference's."
    return alt.TitleParams(f"{whose} each format loses, by its size", subtitle=note, fontSize=15, anchor="start")


def ticks(name: str) -> dict[str, Any]:
    """Return the ticks of an axis, or how many it chooses itself."""
    return {"values": TICKS[name]} if name in TICKS else {"tickCount": 6}


def label_mark(name: str, points: str, text: Mapping[str, Any], avoided: Sequence[str]) -> dict[str, Any]:
    """Return a Vega mark of labels beside the marks `points`, each hiding none of `avoided` and no other label."""
    size = [{"signal": "width"}, {"signal": "height"}]
    place = {"type": "label", "size": size, "anchor": ANCHORS, "offset": [7], "avoidMarks": list(avoided)}
    return {
        "type": "text",
        "name": name,
        "from": {"data": points},
        "interactive": False,
        "encode": {"update": {"text": text, "fontSize": {"value": 12}}},
        "transform": [place | {"padding": 40}],
    }


def vega(drawn: alt.LayerChart) -> dict[str, Any]:
    """Compile a chart to Vega, with a label for every point, and for every roofline if these are drawn."""
    specification = vl_convert.vegalite_to_vega(drawn.to_dict(), vl_version=VERSION)
    marks = specification["marks"]
    hidden = [mark["name"] for mark in marks if mark["type"] in ("symbol", "rule", "rect", "text")]
    marks.append(label_mark("labels", "points_marks", {"field": "datum.label"}, hidden))
    if any(mark["name"] == "rooflines_marks" for mark in marks):
        roofline = {"signal": "'roofline of ' + datum.datum.cell"}
        marks.append(label_mark("roofline_labels", "rooflines_marks", roofline, [*hidden, "labels"]))
    return specification


def program() -> str:
    """Return Vega, as it draws in a browser.

    vl-convert takes five seconds of a core to bundle it. The user's cache folder keeps it, if possible, under its hash,
    so that a damaged file is made again.
    """
    name = f"vega-{vl_convert.__version__}-{VERSION}"
    with suppress(OSError):
        for kept in cache().glob(f"{name}-*.js"):
            content = kept.read_bytes()
            if kept.name == f"{name}-{hashlib.sha256(content).hexdigest()}.js":
                return content.decode()
    made = vl_convert.javascript_bundle(vl_version=VERSION)
    digest = hashlib.sha256(made.encode()).hexdigest()
    with suppress(OSError, UserError), write_atomically(cache() / f"{name}-{digest}.js") as partial:
        partial.write_bytes(made.encode())
    return made


def specifications(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return Vega specifications without data, by `QUALITY/COST`."""
    return {
        f"{quality}/{cost}": vega(chart(quality, cost, rows)) for quality in qualities(rows) for cost in costs(rows)
    }


def detail_specifications(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return Vega specifications of one model's formats, without data: divergence, times between tokens, prompts."""
    colour = colours(rows)
    colour.legend = alt.Legend(orient="bottom", columns=3, title=None)
    base = alt.Chart(alt.NamedData(DATA))
    log = alt.Scale(type="log", nice=False)
    hovered = [alt.Tooltip("cell:N", title="format")]
    divergence = base.mark_line(interpolate="step-after").encode(
        x=alt.X("kld:Q", scale=log, title="KL divergence of a position, nats", axis=alt.Axis(format="~e", tickCount=7)),
        y=alt.Y("share:Q", title="share of positions", axis=alt.Axis(format="~%")),
        color=colour,
        tooltip=[*hovered, alt.Tooltip("kld:Q", format=".2~e"), alt.Tooltip("share:Q", format=".2%")],
    )
    gaps = base.mark_line().encode(
        x=alt.X("itl_ms:Q", scale=log, title="time between two tokens, ms", axis=alt.Axis(format="~g", tickCount=7)),
        y=alt.Y("quantile:Q", title="share of tokens that came as fast", axis=alt.Axis(format="~%")),
        color=colour,
        order="quantile:Q",
        tooltip=[*hovered, alt.Tooltip("itl_ms:Q", format=".3~g"), alt.Tooltip("quantile:Q", format=".1%")],
    )
    prompts = base.mark_point(filled=True, size=60, opacity=0.9).encode(
        x=alt.X("prompt:O", title="prompt", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("ttft_ms:Q", scale=log, title="time to first token, ms", axis=alt.Axis(format="~g", tickCount=6)),
        color=colour,
        tooltip=[*hovered, *(alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("tokens", "ttft_ms", "per_second"))],
    )
    found = {}
    for name, drawn in (("divergence", divergence), ("gaps", gaps), ("prompts", prompts)):
        whole = drawn.properties(width="container", height=260).configure_axis(gridOpacity=0.4)
        whole = whole.configure_view(stroke=None)
        found[name] = vl_convert.vegalite_to_vega(whole.to_dict(), vl_version=VERSION)
    return found
