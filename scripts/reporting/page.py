"""index.html: one file that needs no network. Values are escaped by Jinja2; the plot's script is shipped inside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup

from reporting.numbers import number, size


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What the rows say, in a sentence a model: the fastest format whose quality is that of the reference."""
    reference = results["config"]["reference"]
    sentences = []
    for model in results["config"]["models"]:
        rows = [row for row in results["rows"] if row["model"] == model]
        scored = [row for row in rows if row["perplexity_ratio"]]
        if not scored:
            fastest = max(rows, key=lambda row: row["tokens_per_second"])
            sentences.append(
                f"{model}: {fastest['format']} is fastest at {number(fastest['tokens_per_second'])} tokens/s; "
                f"quality was not measured ({rows[0]['missing'].get('perplexity', 'no reference')})."
            )
            continue
        near = [row for row in scored if row["perplexity_ratio"]["ratio"] <= 1.01]
        best = max(near, key=lambda row: row["tokens_per_second"])
        base = next((row for row in rows if row["format"] == reference), best)
        sentence = f"{model}: {best['format']} is the fastest within 1% of {reference}'s perplexity"
        if best is not base:
            gain = best["tokens_per_second"] / base["tokens_per_second"]
            sentence += f", {number(gain, 3)} times as fast"
            sentence += " (a tie in quality)" if best["perplexity_ratio"]["tie"] else ""
        sentences.append(sentence + ".")
    return sentences


def render(results: Mapping[str, Any], chart: alt.LayerChart | None) -> str:
    """The page's text. The only markup that is not escaped is our own chart's script."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "size": size}
    script = specification = None
    if chart:
        bundle = vl_convert.javascript_bundle(vl_version=".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2]))
        script = Markup(bundle.replace("</script", "<\\/script"))
        specification = Markup(chart.to_json(indent=None).replace("<", "\\u003c"))
    return environment.get_template("page.html.j2").render(
        results=results, verdict=verdict(results), script=script, specification=specification
    )
