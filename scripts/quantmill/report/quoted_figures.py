"""Figures and small tables that a page quotes from result files.

A figure: `<!-- results/smollm2 gguf-q8_0 perplexity -->21.3<!-- end -->`, the folder of a results.json, a row and a
column. `ROW / ROW` quotes the ratio of two rows' figures, `COLUMN / COLUMN` that of a row's own. A row is FORMAT or
FORMAT@RUN, after MODEL: where several models of a study have it, and before :LOAD for a server's load. Columns are
those of results.csv, of tasks too, and of loads.csv, and `perplexity_ratio`, `tokens_per_second_at_N`, of N
sequences that were decoded together, `tokens_per_second_in_MODE`, of another way to decode, `tpot_ms_p50_after_N`, of a
prompt of N tokens, and keys with dots, such as `artifact.gate.faithful.divergence`: the way to it in the row.

A figure of any result file: `<!-- results/smollm2-h200/latency/gguf-q8_0.json protocol.new_tokens -->64<!-- end -->`,
the keys of the path to it, in a list the places.

A table: `<!-- results/smollm2 by bits_per_weight: kld_mean size_bytes -->` and `<!-- end -->`, the rows that have all
of these figures, by the first of them; `<!-- results/smollm2 loads by … -->` has those of servers' loads.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from quantmill.common.program import UserError
from quantmill.report import tasks
from quantmill.report.column import Column
from quantmill.report.labels import label
from quantmill.report.load_columns import LOAD_COLUMNS
from quantmill.report.markdown import cell, lines
from quantmill.report.numbers import number
from quantmill.report.rows import Results

FIGURE = re.compile(r"(<!-- (results/\S+) ([^<>\s]+)(?: / ([^<>\s]+))? ([\w.]+)(?: / (\w+))? -->)[^<]*(<!-- end -->)")
TABLE = re.compile(r"(<!-- (results/\S+) (loads )?by (\w+):((?: \w+)*) -->\n)[^<]*(<!-- end -->)")
KEYS = re.compile(r"(<!-- (results/\S+\.json) ([\w.]+) -->)[^<]*(<!-- end -->)")
STUDY = re.compile(r"<!-- results/\S+: by make readme -->")  # all of a study's rows: report.update_readme
ANY = re.compile(r"<!-- results/[^>]* -->")
# what a row has several of: beginning of the column's name -> the list, what identifies an entry, and the figure
SEVERAL = {
    "tokens_per_second_at_": ("batches", "batch", "tokens_per_second"),
    "tokens_per_second_in_": ("other_modes", "mode", "tokens_per_second"),
    "tpot_ms_p50_after_": ("lengths", "tokens", "tpot_ms_p50"),
}
HEADINGS = {"perplexity_ratio": "perplexity over the reference's"}
Entry = Mapping[str, Any]  # a row or a load


def _enter(content: Any, key: str) -> Any:
    """Return a JSON object's value of a key, or a list's at a place."""
    return content[int(key) if isinstance(content, list) else key]


def name_of(row: Entry) -> str:
    """Return the name of a row or a load."""
    return label(row) + (f":{row['load']}" if "load" in row else "")


def value(row: Entry, column: str) -> Any:
    """Return a row's figure; None if it was not measured. Raises `KeyError` for an unknown column."""
    for beginning, (where, by, figure) in SEVERAL.items():
        if column.startswith(beginning):
            return {f"{beginning}{each[by]}": each.get(figure) for each in row[where] or ()}.get(column)
    if "." in column:
        return reduce(_enter, column.split("."), row)
    return row[column] and row[column]["ratio"] if column == "perplexity_ratio" else row[column]


def text(row: Entry, column: str, columns: Sequence[Column]) -> str:
    """Format a row's figure as tables do. Raises `KeyError` as `value` does, `ValueError` if it was not measured."""
    found = value(row, column)
    if found is None:
        raise ValueError("was not measured")
    known = {each.name: each for each in (LOAD_COLUMNS if "load" in row else columns)}
    if column.startswith("perplexity"):
        return number(found)
    return cell(known[column], found) if column in known else number(found, 3)


def figure(results: Results, first: str, second: str | None, column: str, over: str | None) -> str:
    """Format a figure, or the ratio of two to three digits: to the second row's, or to the column `over`.

    Raises as `text` does, and `KeyError` for an unknown row.
    """
    columns, widened = tasks.widen(results)
    every: list[Entry] = [*widened, *results.get("loads", ())]
    rows = {f"{row['model']}:{name_of(row)}": row for row in every}
    named = Counter(map(name_of, every))
    rows |= {name_of(row): row for row in every if named[name_of(row)] == 1}
    said = text(rows[first], column, columns)
    if second is None and over is None:
        return said
    other = (rows[second or first], over or column)
    text(*other, columns)
    return number(value(rows[first], column) / value(*other), 3)


def table(results: Results, loads: bool, names: list[str]) -> str:
    """Return a table of rows that have all figures, by the first of them. Raises as `text` does."""
    columns, widened = tasks.widen(results)
    known = {each.name: each.heading for each in (LOAD_COLUMNS if loads else columns)} | HEADINGS
    every: list[Entry] = [*(results["loads"] if loads else widened)]
    rows = [row for row in every if None not in [value(row, each) for each in names]]
    rows = sorted(rows, key=lambda row: value(row, names[0]))
    several = len({row["model"] for row in rows}) > 1
    named = [f"`{row['model']}:{name_of(row)}`" if several else f"`{name_of(row)}`" for row in rows]
    body = [[name, *(text(row, each, columns) for each in names)] for name, row in zip(named, rows, strict=True)]
    return "\n".join(lines(["row", *(known.get(each, each.replace("_", " ")) for each in names)], body))


def fill(page: str, read_run: Callable[[str], Results], read: Callable[[Path], Any]) -> str:
    """Return the page with all its quotes made again.

    `read_run` returns the results of a folder, `read` a file's content. Raises `UserError` for an unknown row, column
    or figure, and for a quote that cannot be parsed.
    """

    def renew(begin: str, make: Callable[[], str]) -> str:
        try:
            return begin + make()
        except (LookupError, ValueError, TypeError, ZeroDivisionError) as error:
            raise UserError(f"{begin.strip()}: there is no such figure ({error}); correct the quote") from None

    def renew_figure(found: re.Match[str]) -> str:
        begin, folder, first, second, column, over, end = found.groups()
        return renew(begin, lambda: figure(read_run(folder), first, second, column, over)) + end

    def renew_keys(found: re.Match[str]) -> str:
        begin, file, keys, end = found.groups()
        return renew(begin, lambda: number(reduce(_enter, keys.split("."), read(Path(file))))) + end

    def renew_table(found: re.Match[str]) -> str:
        begin, folder, loads, first, more, end = found.groups()
        return renew(begin, lambda: table(read_run(folder), bool(loads), [first, *more.split()])) + f"\n{end}"

    for found in ANY.finditer(page):
        if not any(each.match(page, found.start()) for each in (STUDY, KEYS, FIGURE, TABLE)):
            raise UserError(f"{found[0]}: is not a quote; write <!-- FOLDER ROW COLUMN --> and <!-- end -->")
    return TABLE.sub(renew_table, FIGURE.sub(renew_figure, KEYS.sub(renew_keys, page)))
