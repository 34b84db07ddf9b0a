"""The plots, what draws them in a browser, and the pictures; or the reason why this machine cannot draw them."""

import base64
import resource
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

ADDRESSES = 70e9  # bytes that V8, which vl-convert runs, reserves; it ends its process where a limit forbids that
# a PNG of one white pixel
BLANK = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="


@dataclass(frozen=True)
class Drawing:
    """Plots and pictures: `plots`, `details` and `loads` are Vega specifications by name, `vega` the program that
    draws them, `svg` and `png` the picture of speeds, `sizes` that of sizes. If nothing could, `refused` says why, in
    the pictures' place too; the PNG is blank."""

    svg: str
    sizes: str
    png: bytes
    plots: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    loads: Mapping[str, Any] = field(default_factory=dict)
    vega: str = ""
    refused: str | None = None


def draw(rows: Sequence[Mapping[str, Any]], loads: bool = False) -> Drawing:
    """Draw the rows of `axes.points`, and compile the plots that the page fills with them, and with `loads`."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < ADDRESSES:
        why = (
            f"drawing reserves about 68 GB of addresses, and a limit (ulimit -v) allows {limit / 1e9:.3g} GB; make the "
            "page again without the limit"
        )
        told = placeholder(why)
        return Drawing(svg=told, sizes=told, png=base64.b64decode(BLANK), refused=why)
    import vl_convert  # envs/tools alone has it

    from quantmill.report import load_plots, picture, plot

    speeds, sizes = (picture.specification(*axes, rows) for axes in (picture.SPEED, picture.SIZE))
    return Drawing(
        svg=vl_convert.vega_to_svg(speeds),
        sizes=vl_convert.vega_to_svg(sizes),
        png=vl_convert.vega_to_png(speeds, scale=2),
        plots=plot.specifications(rows),
        details=plot.detail_specifications(rows),
        loads=load_plots.specifications(rows) if loads else {},
        vega=plot.program(),
    )


def placeholder(why: str) -> str:
    """Return an SVG that says why there is no picture."""
    told = ["The plot could not be drawn. results.csv and index.html have its figures.", "", *textwrap.wrap(why, 90)]
    texts = "".join(f'<text x="20" y="{40 + 22 * i}">{escape(line)}</text>' for i, line in enumerate(told))
    size = f'width="900" height="{60 + 22 * len(told)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="15">{texts}</svg>\n'
