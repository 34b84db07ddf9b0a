"""The plots of servers under load: Vega-Lite through Altair, compiled to Vega; the page fills them with its rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert

from quantmill.report.plot import DATA, VERSION, colours


def specifications(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return Vega specifications without data, by name; `rows` as for the other plots, for the same colours.

    throughput: of all users together over that of one. slo_attainment: share within the limits over the rate. ttft_ms,
    itl_ms: cumulative share of requests, or gaps.
    """
    colour = colours(rows)
    colour.legend = alt.Legend(orient="bottom", columns=3, title=None)
    base = alt.Chart(alt.NamedData(DATA))
    hovered = [alt.Tooltip("cell:N", title="format"), alt.Tooltip("load:N")]
    log, total = alt.Scale(type="log", nice=False, padding=20), "tokens a second of all users together"
    axis = alt.Axis(format="~s", tickCount=6)
    together = alt.Y("output_tokens_per_second:Q", scale=log, title=total, axis=axis)
    alone = alt.X("user_tokens_per_second:Q", scale=log, title="tokens a second that a user sees", axis=axis)
    figures = ("output_tokens_per_second", "user_tokens_per_second", "ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p90")
    told = [*hovered, *(alt.Tooltip(f"{name}:Q", format=".4~g") for name in figures)]
    low, high = (f"output_tokens_per_second_{end}:Q" for end in ("low", "high"))
    bar = base.transform_filter("isValid(datum.output_tokens_per_second_low)").mark_rule(strokeWidth=2)
    throughput = alt.layer(
        base.mark_line(strokeWidth=1.5).encode(x=alone, y=together, color=colour, order="slots:Q"),
        bar.encode(x=alone, y=alt.Y(low, title=total), y2=high, color=colour),
        base.mark_point(filled=True, size=80).encode(x=alone, y=together, color=colour, tooltip=told),
    )
    attainment = base.mark_line(point=True, strokeWidth=1.5).encode(
        x=alt.X("rate:Q", title="requests a second that arrive", scale=alt.Scale(zero=False, padding=20)),
        y=alt.Y("slo_attainment:Q", title="share within the limits", axis=alt.Axis(format="~%")),
        color=colour,
        order="rate:Q",
        tooltip=[*hovered, alt.Tooltip("rate:Q", format=".4~g"), alt.Tooltip("slo_attainment:Q", format=".2%")],
    )
    drawn = {"throughput": throughput, "slo_attainment": attainment}
    for name, title in (("ttft_ms", "time to the first token, ms"), ("itl_ms", "time between two events, ms")):
        drawn[name] = base.mark_line().encode(
            x=alt.X("ms:Q", title=title, scale=alt.Scale(type="log", nice=False), axis=alt.Axis(format="~g")),
            y=alt.Y("quantile:Q", title="share that came as fast", axis=alt.Axis(format="~%")),
            color=colour,
            order="quantile:Q",
            tooltip=[*hovered, alt.Tooltip("ms:Q", format=".3~g"), alt.Tooltip("quantile:Q", format=".0%")],
        )
    whole = {
        name: each.properties(width="container", height=280).configure_axis(gridOpacity=0.4).configure_view(stroke=None)
        for name, each in drawn.items()
    }
    return {name: vl_convert.vegalite_to_vega(each.to_dict(), vl_version=VERSION) for name, each in whole.items()}
