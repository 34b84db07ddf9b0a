"""Say what changed significantly between two runs of a study, and whether anything became worse.

    python scripts/quantmill report.compare BEFORE/results.json AFTER/results.json [--tolerance 0.05]
        [--quality-tolerance 0.001]
    envs/tools/bin/python scripts/quantmill report.compare BEFORE/results.json AFTER/results.json --page OUT.html

Exit status 0: nothing became worse. 1: something did, or a row or a figure that BEFORE has is gone. 2: something could
not be compared (another evaluation text, a disturbed speed, other versions of the metrics, no row in common).
docs/REPORT.md says how each figure is judged. The output is Markdown.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, parser, printable
from quantmill.report import merge_runs
from quantmill.report.columns import COLUMNS
from quantmill.report.comparison import REGRESSIONS, Change, Limits, Pair, Verdict, figures, pairs
from quantmill.report.labels import label
from quantmill.report.numbers import MISSING, number, size
from quantmill.report.reading import check_together, read_results

WORDS: dict[Verdict, str] = {
    "worse": "WORSE",
    "gone": "GONE",
    "incomparable": "not comparable",
    "disturbed": "disturbed",
    "better": "better",
    "new": "new",
}  # the gravest first
BY_NAME = {column.name: column for column in COLUMNS}
ERROR = 2  # the exit status of an error, which is not a regression


def amount(change: Change, interval: bool = False) -> str:
    """Return how far a figure moved, with its interval on demand: relative, of the divergence in nats."""
    if change.amount is None or change.after is None or change.before is None:
        return WORDS[change.verdict]
    column = BY_NAME[change.figure]
    if (column.unit, column.parts) == ("B", ("artifact",)):
        return f"{change.after - change.before:+} B" if change.amount else "="
    form = {"paired difference": "+.1g", "paired ratio": "+.2%"}.get(column.judge or "", "+.1%")
    values = [format(value, form) if value else "=" for value in (change.amount, change.low, change.high)]
    return f"{values[0]} ({values[1]} to {values[2]})" if interval and change.low != change.high else values[0]


def share(text: str) -> float:
    """Parse a tolerance, which is at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def verdict(pair: Pair) -> str:
    """Summarise a row's figures, the gravest first."""
    if pair.before is None or pair.after is None:
        return "new row" if pair.after else "GONE"
    named = {word: [BY_NAME[each.figure].heading for each in pair.changes if each.verdict == word] for word in WORDS}
    told = "; ".join(f"{WORDS[word]}: {', '.join(figures)}" for word, figures in named.items() if figures) or "same"
    return f"{told} (disturbed)" if pair.interference and not named["disturbed"] else told


def table(found: Sequence[Pair]) -> list[str]:
    """Return one aligned Markdown row per cell."""
    lines = [["model", "format", *(column.heading for column in figures()), "verdict"]]
    ranges = [column.name for column in figures() if column.judge in ("interval", "paired ratio")]
    for pair in found:
        cells = {each.figure: amount(each, each.figure in ranges) for each in pair.changes}
        amounts = (cells.get(column.name, MISSING) for column in figures())
        lines.append([pair.row["model"], label(pair.row), *amounts, verdict(pair)])
    lines = [[printable(cell).replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]


def details(found: Sequence[Pair]) -> Iterator[str]:
    """Yield a line for each figure that changed, the gravest first, and for each row of one run alone."""
    for word, said in WORDS.items():
        for pair in found:
            changed = [each for each in pair.changes if each.verdict == word]
            device = next((row["device"] for row in (pair.before, pair.after) if row and row["device"]), MISSING)
            name = f"{pair.row['model']}, {label(pair.row)} ({pair.row['engine']}, {device})"
            if word == "gone" and pair.after is None:
                yield f"- {said}: {name}: no such row"
            if word == "new" and pair.before is None:
                yield f"- {said}: {name}"
            for each in changed:
                yield f"- {said}: {name}: {describe(each)}"
            if changed and word == "disturbed":
                yield f"  - meanwhile, {'; '.join(pair.interference)}"
            elif changed and pair.differences and word in ("worse", "better"):
                yield f"  - also different: {', '.join(pair.differences)}"


def describe(change: Change) -> str:
    """Describe a figure before and after."""
    column = BY_NAME[change.figure]
    form = size if column.unit == "B" else number
    text = f"{column.heading} {form(change.before)} → {form(change.after)}"
    if change.amount is not None:
        text += f", {amount(change, interval=change.low is not None)}"
    return f"{text}: {change.note}" if change.note else text


def status(found: Sequence[Pair]) -> int:
    """Return the exit status, see the program's docstring."""
    verdicts = Counter(each.verdict for pair in found for each in pair.changes)
    if any(pair.after is None for pair in found) or any(verdicts[word] for word in REGRESSIONS):
        return 1
    return 2 if verdicts["incomparable"] or verdicts["disturbed"] else 0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("before", type=Path, help="a results.json")
    arguments.add_argument("after", type=Path, help="a results.json")
    arguments.add_argument(
        "--tolerance", type=share, default=Limits.speed, help="tolerated relative change of speed and memory"
    )
    arguments.add_argument(
        "--quality-tolerance", type=share, default=Limits.quality, help="the same of perplexity, and nats of divergence"
    )
    arguments.add_argument("--count-disturbed", action="store_true", help="judge disturbed speeds as well")
    arguments.add_argument("--page", type=Path, help="write a page with both on the same plots; wants envs/tools")
    options = arguments.parse_args()

    before, after = read_results(options.before), read_results(options.after)
    check_together({str(options.before): before, str(options.after): after})
    found = pairs(before, after, Limits(options.tolerance, options.quality_tolerance, options.count_disturbed))
    lines = [*table(found), "", *map(printable, details(found))]
    if not any(pair.before and pair.after for pair in found):
        names = [", ".join(sorted({row["device"] or "nothing" for row in each["rows"]})) for each in (before, after)]
        devices = f" (one is of {names[0]}, the other of {names[1]})" if names[0] != names[1] else ""
        raise UserError(f"{options.before} and {options.after}: no row in common{devices}")
    if options.page:
        try:
            text = merge_runs.page(before, after)
        except ModuleNotFoundError as error:
            raise UserError(f"--page: {sys.executable} lacks {error.name}; run envs/tools/bin/python instead") from None
        with write_atomically(options.page) as partial:
            partial.write_text(text, encoding="utf-8")
    print("\n".join(lines).rstrip())
    sys.exit(status(found))
