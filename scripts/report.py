#!/usr/bin/env python3
"""Join all results to results.csv, results.json, results.parquet, quality-speed.svg and .png, and index.html.

    python scripts/report.py STUDY DST

STUDY is the study.json that the workflow writes (the checked config and where each cell's results are), DST a folder.
"""

import json
from pathlib import Path

from common import manifest
from common.program import parser, run
from common.publish import publish, publish_json
from reporting import page, parquet, plot, results


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("study", type=Path)
    arguments.add_argument("dst", type=Path, help="folder to write to")
    options = arguments.parse_args()

    study = json.loads(options.study.read_text(encoding="utf-8"))
    collected = results.collect(study)
    picture = plot.chart("perplexity", "tokens_per_second", collected["rows"], picture=True)
    with publish(options.dst / "results.csv") as partial:
        results.write_csv(partial, collected["rows"])
    publish_json(options.dst / "results.json", collected)
    with publish(options.dst / "results.parquet") as partial:
        parquet.write(partial, collected, manifest.sha256(options.dst / "results.json"))
    for suffix, how in (("svg", {}), ("png", {"scale_factor": 2})):
        with publish(options.dst / f"quality-speed.{suffix}") as partial:
            picture.save(str(partial), format=suffix, **how)
    with publish(options.dst / "index.html") as partial:
        partial.write_text(page.render(collected, study), encoding="utf-8")


if __name__ == "__main__":
    run(main)
