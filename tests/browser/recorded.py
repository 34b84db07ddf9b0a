"""The page of recorded rows, of which only results.json is there: no artifact, no times, no texts.

PYTHONPATH=scripts envs/tools/bin/python tests/browser/recorded.py RESULTS.json PAGE.html
"""

import json
import sys
from pathlib import Path

from quantmill.report import axes, drawing, page


def main(source: Path, target: Path) -> None:
    collected = json.loads(source.read_text(encoding="utf-8"))
    absent = {"artifact": "none", "latency": "none", "quality": None, "absent": {}}
    absent["logs"] = {"latency": ["none"]}
    cells = [{"model": row["model"], "format": row["format"], **absent} for row in collected["rows"]]
    study = {"config": collected["config"], "cells": cells, "options": "--cores 8"}
    drawn = drawing.draw(axes.points(collected["rows"]))
    target.write_text(page.render(collected, study, drawn), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
