"""The plots and what draws them in a browser, made in a process of its own: V8, which vl-convert runs, reserves some
68 GB of addresses, and where a limit (`ulimit -v`, as batch systems set it) forbids that it ends its whole process.

    python scripts/quantmill report.drawing FOLDER [loads] < ROWS

ROWS: JSON, of `axes.points`. In FOLDER: plots.json, vega.js, quality-speed.svg and .png, quality-size.svg.
"""

import json
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from quantmill.common.program import command, run_child

FILES = Path(__file__).with_name("page_files")
NO_PICTURE = FILES / "no-plot.png"  # a text that says so


@dataclass(frozen=True)
class Drawing:
    """What could be drawn: `plots`, `details` and `loads` are Vega specifications by name, `vega` the program that
    draws them, `svg` and `png` the picture of speeds, `sizes` that of sizes. Where nothing could, `refused` says why,
    and the pictures are texts."""

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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*command("report.drawing"), name, *(["loads"] if loads else [])]
        made = run_child(words, stdin=json.dumps(rows))
        if made.returncode:
            why = refusal(made.returncode, made.stderr)
            told = placeholder(why)
            return Drawing(svg=told, sizes=told, png=NO_PICTURE.read_bytes(), refused=why)
        return Drawing(
            svg=(folder / "quality-speed.svg").read_text(encoding="utf-8"),
            sizes=(folder / "quality-size.svg").read_text(encoding="utf-8"),
            png=(folder / "quality-speed.png").read_bytes(),
            vega=(folder / "vega.js").read_text(encoding="utf-8"),
            **json.loads((folder / "plots.json").read_text(encoding="utf-8")),
        )


def refusal(status: int, said: str) -> str:
    """Why the process that draws ended: the limit of its addresses, or else its own words and how it ended."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if status < 0 and limit != resource.RLIM_INFINITY:
        return (
            f"what draws reserves about 68 GB of addresses, and a limit (ulimit -v) allows {limit / 1e9:.3g} GB; "
            "make the page again without the limit"
        )
    lines = [line.strip("# ") for line in said.splitlines() if line.strip("# ")]
    fatal = next((line for line in lines if line.startswith("Fatal")), lines[-1] if lines else "it said nothing")
    ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"what draws {ended}: {fatal:.200}"


def placeholder(why: str) -> str:
    """An SVG that says why there is no picture."""
    words, lines = why.split(), [""]
    for word in words:
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if len(lines[-1]) < 80 else [*lines, word]
    told = ["The plot could not be drawn. results.csv and index.html have its figures.", "", *lines]
    texts = "".join(f'<text x="20" y="{40 + 22 * i}">{escape(line)}</text>' for i, line in enumerate(told))
    size = f'width="900" height="{60 + 22 * len(told)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="15">{texts}</svg>\n'


def main() -> None:
    import vl_convert  # here, so that who only asks for a drawing does not load what may end the process

    from quantmill.report import load_plots, picture, plot

    folder, more = Path(sys.argv[1]), sys.argv[2:]
    rows = json.load(sys.stdin)
    compiled = {"plots": plot.specifications(rows), "details": plot.detail_specifications(rows)}
    compiled |= {"loads": load_plots.specifications(rows)} if more else {}
    (folder / "plots.json").write_text(json.dumps(compiled), encoding="utf-8")
    (folder / "vega.js").write_text(plot.program(), encoding="utf-8")
    speeds, sizes = (picture.specification(*axes, rows) for axes in (picture.SPEED, picture.SIZE))
    (folder / "quality-size.svg").write_text(vl_convert.vega_to_svg(sizes), encoding="utf-8")
    (folder / "quality-speed.svg").write_text(vl_convert.vega_to_svg(speeds), encoding="utf-8")
    (folder / "quality-speed.png").write_bytes(vl_convert.vega_to_png(speeds, scale=2))
