#!/usr/bin/env python3
"""Put runs' tables into the README, each between its markers; with --check, say whether they have drifted.

    python scripts/update_readme.py README.md results/demo [results/…] [--short] [--check]

A run is a folder with results.json; its markers are `<!-- results/demo: by make readme -->` and `<!-- end -->`.
"""

import json
from pathlib import Path

from common.program import UserError, parser, run
from reporting.markdown import table
from reporting.results import upgrade

END = "<!-- end -->"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("readme", type=Path)
    arguments.add_argument("runs", type=Path, nargs="+", help="folders with results.json")
    arguments.add_argument("--short", action="store_true", help="the six columns of the README instead of all")
    arguments.add_argument("--check", action="store_true", help="change nothing; fail where the README has drifted")
    options = arguments.parse_args()

    text = updated = options.readme.read_text(encoding="utf-8")
    for folder in options.runs:
        begin = f"<!-- {folder.as_posix()}: by make readme -->"
        before, found, rest = updated.partition(begin)
        _, closed, after = rest.partition(END)
        if not (found and closed):
            raise UserError(f"{options.readme}: lacks the markers {begin!r} and {END!r}; put them back")
        results = upgrade(json.loads((folder / "results.json").read_text(encoding="utf-8")))
        updated = f"{before}{begin}\n{table(results, options.short)}\n{END}{after}"
    if options.check and updated != text:
        raise UserError(f"{options.readme}: its tables are not what the runs measured; run make readme")
    if not options.check:
        options.readme.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    run(main)
