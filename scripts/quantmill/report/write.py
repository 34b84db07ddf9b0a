"""Write the report: the page, the pictures, and all results as CSV, JSON and Parquet.

    python scripts/quantmill report.write STUDY DST [--incomplete | --running]

STUDY is the study.json that the workflow writes (the checked config and where each cell's results are), DST a folder.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pyarrow.parquet import write_table

from quantmill.common import manifest
from quantmill.common.atomic import write_atomically
from quantmill.common.program import parser, printable
from quantmill.report import axes, drawing, loads, page, parquet, results, tasks
from quantmill.report.load_columns import LOAD_COLUMNS
from quantmill.report.rows import Study

LONG_AGO = 1.0  # seconds since 1970


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("study", type=Path)
    arguments.add_argument("dst", type=Path, help="folder to write to")
    arguments.add_argument(
        "--incomplete",
        action="store_true",
        help="jobs failed: name them; standard input is a JSON list of the files that were still to be made, which may "
        "exist from before an edit; date the files before what they are made of",
    )
    arguments.add_argument(
        "--running",
        action="store_true",
        help="jobs still run: standard input is a JSON list of the files to come; date the files as --incomplete does",
    )
    options = arguments.parse_args()
    dst, old = options.dst, options.incomplete or options.running

    study: Study = json.loads(options.study.read_text(encoding="utf-8"))
    to_come = set(json.load(sys.stdin)) if old else set()
    for cell in study["cells"]:
        parts = [name for name in (*results.PARTS, "loads", "tasks") if cell.get(name) in to_come]
        if options.running:
            cell["pending"] = parts
        else:
            cell["outdated"] = parts
    collected = results.collect(study)
    rows = collected["rows"]
    if served := loads.collect(study, rows):
        collected["loads"] = served
    if asked := tasks.collect(study, rows):
        collected["tasks"] = asked
    table, wide = tasks.widen(collected)
    drawn = drawing.draw(axes.points(wide, tasks.axes(table)), loads=bool(served))
    text = page.render(collected, study, drawn)
    files: dict[str, Callable[[Path], object]] = {
        "results.csv": lambda path: results.write_csv(path, wide, table),
        "results.json": lambda path: path.write_text(json.dumps(collected, allow_nan=False) + "\n", encoding="utf-8"),
        "results.parquet": lambda path: write_table(
            parquet.table({**collected, "rows": wide}, manifest.sha256(dst / "results.json"), table), path
        ),
        "quality-speed.svg": lambda path: path.write_text(drawn.svg, encoding="utf-8"),
        "quality-size.svg": lambda path: path.write_text(drawn.sizes, encoding="utf-8"),
        "quality-speed.png": lambda path: path.write_bytes(drawn.png),
        "index.html": lambda path: path.write_text(text, encoding="utf-8"),
    }
    if served:
        files = {"loads.csv": lambda path: results.write_csv(path, served, LOAD_COLUMNS)} | files
    for name, write in files.items():
        with write_atomically(dst / name) as partial:
            write(partial)
            if old:  # so that Snakemake still has it to make
                os.utime(partial, (LONG_AGO, LONG_AGO))
    if drawn.refused:
        print(f"warning: the plots could not be drawn: {drawn.refused}", file=sys.stderr)
    if options.incomplete:
        lines = [*page.failure_lines([*wide, *served]), f"What was measured: {dst / 'index.html'}"]
        print("\n".join(map(printable, lines)))
        print(f"To go on: {page.commands(study, rows)['resume']}")
