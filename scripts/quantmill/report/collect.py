"""Put the results of many studies into one Parquet file and one page.

    envs/tools/bin/python scripts/quantmill report.collect STUDY STUDY … --out FOLDER

STUDY is a results.json, a folder with one (a report, or a published repository as it was downloaded), its model card,
or a repository of the hub: ORGANISATION/NAME[@REVISION]. FOLDER gets collected.parquet, with a row for each that was
measured, collected.html, and the report's pictures, quality-speed.svg and quality-size.svg. Rows that were not
measured alike (another device, protocol, text or source) are in sections of their own, and no verdict compares them;
the column `measured_alike` names the section.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet as files

from quantmill.common import manifest, plain_file
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, parser
from quantmill.fetch import hub
from quantmill.report import axes, drawing, merge_studies, page, parquet, summary, tasks
from quantmill.report.reading import check_together, read_results
from quantmill.report.rows import Results
from quantmill.report.rows import Study as Shown

RESULTS, CARD = "results.json", "README.md"
REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """A results.json, and the name of its rows' study."""

    name: str
    path: Path
    content: Results


def find_results(text: str) -> tuple[str, Path]:
    """Return a study's name and its results.json. Raises `UserError` if there is none."""
    path = Path(text)
    if path.name == CARD:
        path = path.parent
    if path.is_dir():
        path = path / RESULTS
    if plain_file.is_there(path):
        return (path.parent.resolve().name if path.name == RESULTS else path.stem), path
    repository = REPOSITORY.fullmatch(text)
    if not repository or path.parent.is_dir():
        raise UserError(f"{text}: holds no {RESULTS}; name one, a folder with one, or ORGANISATION/NAME of the hub")
    found = hub.resolve(repository[1], repository[2] or "main")
    if RESULTS not in found.files:
        raise UserError(f"{text}: holds no {RESULTS}, so Quantmill did not publish it; name another")
    return found.name, hub.fetch(found, [RESULTS])[RESULTS]


def read_all(texts: Sequence[str]) -> list[Source]:
    """Read all studies, each with a name of its own."""
    found: list[Source] = []
    for text in texts:
        name, path = find_results(text)
        same = sum(each.name == name or each.name.startswith(f"{name} (") for each in found)
        found.append(Source(f"{name} ({same + 1})" if same else name, path, read_results(path)))
    return found


def table(studies: Sequence[Source], merged: Results, origins: Sequence[tuple[str, int]]) -> pa.Table:
    """Return the rows as their studies have them, with the names of study and section."""
    tables = {each.name: parquet.table(each.content, manifest.sha256(each.path)) for each in studies}
    rows = pa.concat_tables([tables[name].slice(place, 1) for name, place in origins])
    texts: dict[str, tuple[list[str], str]] = {
        "study": ([name for name, _ in origins], "The study that the row is of."),
        "measured_alike": (
            [row["model"] for row in merged["rows"]],
            "Rows of one text here have the same source, device, text and protocols; others cannot be compared.",
        ),
    }
    for name, (values, text) in texts.items():
        field = pa.field(name, pa.string(), metadata={"description": text})
        rows = rows.append_column(field, pa.array(values, pa.string()))
    return rows.combine_chunks()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("studies", nargs="+", metavar="STUDY")
    arguments.add_argument("--out", type=Path, required=True, help="folder to write")
    options = arguments.parse_args()

    studies = read_all(options.studies)
    check_together({str(each.path): each.content for each in studies})
    merged, origins = merge_studies.merge({each.name: each.content for each in studies})
    rows = table(studies, merged, origins)
    shown = Shown(config=merged["config"], cells=[], options="")
    columns, wide = tasks.widen(merged)
    drawn = drawing.draw(axes.points(wide, tasks.axes(columns)))
    text = page.render(merged, shown, drawn)
    options.out.mkdir(parents=True, exist_ok=True)
    with write_atomically(options.out / "collected.parquet") as partial:
        files.write_table(rows, partial)
    with write_atomically(options.out / "collected.html") as partial:
        partial.write_text(text, encoding="utf-8")
    for name, picture in (("quality-speed.svg", drawn.svg), ("quality-size.svg", drawn.sizes)):
        with write_atomically(options.out / name) as partial:
            partial.write_text(picture, encoding="utf-8")
    print(summary.text(merged, str(options.out / "collected.html")))
