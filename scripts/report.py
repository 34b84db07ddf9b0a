#!/usr/bin/env python3
"""Join all results to results.csv, results.json, results.parquet, quality-speed.svg and index.html.

    python scripts/report.py STUDY DST

STUDY is the study.json that the workflow writes (the checked config and where each cell's results are), DST a folder.
"""

import json
from pathlib import Path

from common import manifest
from common.program import parser, run
from common.publish import publish, publish_json
from reporting import page, parquet, plot, results

EMPTY_SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="40"><text x="8" y="24">no row has both speed and quality</text></svg>\n'  # noqa: E501


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("study", type=Path)
    arguments.add_argument("dst", type=Path, help="folder to write to")
    options = arguments.parse_args()

    collected = results.collect(json.loads(options.study.read_text(encoding="utf-8")))
    chart = plot.chart(collected["rows"])
    with publish(options.dst / "results.csv") as partial:
        results.write_csv(partial, collected["rows"])
    publish_json(options.dst / "results.json", collected)
    with publish(options.dst / "results.parquet") as partial:
        parquet.write(partial, collected, manifest.sha256(options.dst / "results.json"))
    with publish(options.dst / "quality-speed.svg") as partial:
        if chart:
            chart.save(str(partial), format="svg")
        else:
            partial.write_text(EMPTY_SVG, encoding="utf-8")
    with publish(options.dst / "index.html") as partial:
        partial.write_text(page.render(collected, chart), encoding="utf-8")


if __name__ == "__main__":
    run(main)
