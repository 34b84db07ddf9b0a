"""The quality-versus-speed plot, as a Vega-Lite chart: drawn in the page by its script, and as SVG beside it."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

# Okabe and Ito's palette, distinguishable with every common colour blindness
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


def plotted(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the plot shows of the rows that have both a speed and a quality.

    Its perplexity intervals are those of the difference from the reference on the same windows: how the perplexity
    would move with another text is common to all formats of a model, and would hide what sets them apart.
    """
    names = (
        *(
            "model",
            "format",
            "device",
            "pareto",
            "perplexity",
            "perplexity_low",
            "perplexity_high",
            "tokens_per_second",
        ),
        *("tokens_per_second_low", "tokens_per_second_high", "size_bytes", "bits_per_weight", "compute_type"),
    )
    several = len({row["model"] for row in rows}) > 1
    shown = [{name: row[name] for name in names} for row in rows if row["perplexity"] is not None]
    for value, row in zip(shown, (row for row in rows if row["perplexity"] is not None), strict=True):
        value["label"] = f"{row['model']}: {row['format']}" if several else row["format"]
        paired = row["perplexity_ratio"]
        if paired:  # the reference's perplexity as it is, and only what the format changes with its uncertainty
            base = row["perplexity"] / paired["ratio"]
            value |= {"perplexity_low": base * paired["low"], "perplexity_high": base * paired["high"]}
    return shown


def chart(rows: Sequence[Mapping[str, Any]]) -> alt.LayerChart | None:
    """Perplexity (downwards is better) over tokens per second, 95% intervals as bars and the Pareto front as a line.

    None where no row has both.
    """
    values = plotted(rows)
    if not values:
        return None
    formats = sorted({value["format"] for value in values})
    base = alt.Chart(alt.Data(values=values))
    colour = alt.Color("format:N", scale=alt.Scale(domain=formats, range=PALETTE * (1 + len(formats) // len(PALETTE))))
    shape = alt.Shape("model:N", legend=alt.Legend() if len({value["model"] for value in values}) > 1 else None)
    speed = alt.X(
        "tokens_per_second:Q",
        title="tokens per second (more is better)",
        scale=alt.Scale(zero=False, nice=False, padding=24),
    )
    loss = alt.Y(
        "perplexity:Q", title="perplexity (less is better)", scale=alt.Scale(zero=False, nice=False, padding=24)
    )
    front = (
        base.transform_filter("datum.pareto")
        .mark_line(strokeDash=[4, 4], color="#888888", interpolate="linear")
        .encode(x=speed, y=loss, detail="model:N", order="tokens_per_second:Q")
    )
    speed_interval = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("tokens_per_second_low:Q"), x2="tokens_per_second_high:Q", y=loss, color=colour
    )
    loss_interval = base.mark_rule(strokeWidth=2).encode(
        y=alt.Y("perplexity_low:Q"), y2="perplexity_high:Q", x=speed, color=colour
    )
    tooltip = [
        *("model:N", "format:N", "compute_type:N", "device:N"),
        *(alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("perplexity", "perplexity_low", "perplexity_high")),
        *(
            alt.Tooltip(f"{name}:Q", format=".4~g")
            for name in ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high", "bits_per_weight")
        ),
        alt.Tooltip("size_bytes:Q", format=".3~s"),
        "pareto:N",
    ]
    points = base.mark_point(filled=True, size=110, opacity=1).encode(
        x=speed, y=loss, color=colour, shape=shape, tooltip=tooltip
    )
    labels = base.mark_text(align="left", dx=9, dy=-9, fontSize=12).encode(
        x=speed, y=loss, text="label:N", color=colour
    )
    return (
        alt.layer(front, speed_interval, loss_interval, points, labels)
        .properties(width=820, height=400)
        .configure_axis(labelFontSize=12, titleFontSize=13, grid=True, gridOpacity=0.4)
        .configure_view(stroke=None)
    )
