"""Put runs' tables and figures into a page, each between its markers; with --check, fail if they have drifted.

    python scripts/quantmill report.update_readme README.md [results/demo …] [--short] [--check]

A run is a folder with results.json, or a JSON file of rows; the markers of its table are
`<!-- results/demo: by make readme -->` and `<!-- end -->`. Figures in sentences have markers too: quoted_figures.py.
"""

from pathlib import Path
from typing import Any, cast

from quantmill.common import bounded_json
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, parser
from quantmill.report import quoted_figures
from quantmill.report.markdown import lines, table
from quantmill.report.rows import Results

END = "<!-- end -->"


def read(path: Path) -> Any:
    """Read a JSON file. Raises `UserError` if it cannot be read."""
    try:
        return bounded_json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; correct the page's marker") from None
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error!s:.80}); measure the run again") from None


def read_run(folder: str) -> Results:
    """Read a run's results. Raises as `read` does."""
    path = Path(folder) / "results.json"
    results = read(path)
    if not isinstance(results, dict):
        raise UserError(f"{path}: is damaged (not an object); measure the run again")
    return cast(Results, results)


def table_of(run: Path, short: bool) -> str:
    """Return a run's table. Raises `UserError` if the run cannot be read."""
    if run.suffix != ".json":
        return table(read_run(run.as_posix()), short)
    try:
        rows = bounded_json.loads(run.read_bytes())
        names = list(rows[0])
        body = [[str(row[name]) for name in names] for row in rows]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{run}: is not a table of rows ({error!s:.80}); make it again") from None
    return "\n".join(lines(names, body))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("readme", type=Path)
    arguments.add_argument("runs", type=Path, nargs="*", help="folders with results.json, or tables as JSON")
    arguments.add_argument("--short", action="store_true", help="the README's columns instead of all")
    arguments.add_argument("--check", action="store_true", help="change nothing; fail if the README has drifted")
    options = arguments.parse_args()

    text = updated = options.readme.read_text(encoding="utf-8")
    for folder in options.runs:
        begin = f"<!-- {folder.as_posix()}: by make readme -->"
        before, found, rest = updated.partition(begin)
        old, closed, after = rest.partition(END)
        if not (found and closed) or "<!-- " in old:  # another marker's end would take the text between along
            raise UserError(f"{options.readme}: lacks the markers {begin!r} and {END!r}; put them back")
        updated = f"{before}{begin}\n{table_of(folder, options.short)}\n{END}{after}"
    updated = quoted_figures.fill(updated, read_run, read)
    if options.check and updated != text:
        raise UserError(f"{options.readme}: its tables or figures are not what the runs measured; run make readme")
    if not options.check:
        with write_atomically(options.readme) as partial:
            partial.write_text(updated, encoding="utf-8")
