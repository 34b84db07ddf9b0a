"""The tables of README.md and results/*/README.md: written between markers, and found out when they drift."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantmill.report import markdown, page_header, tasks
from quantmill.report.load_columns import LOAD_COLUMNS
from quantmill.report.numbers import MISSING

REPO = Path(__file__).resolve().parents[2]
SIX = ["format", "runs in", "tokens/s (95%)", "perplexity", "over the reference (95%, paired)", "size"]
BEGIN, END = "<!-- results/demo: by make readme -->\n", "<!-- end -->\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with the recorded demo and a page that has its markers."""
    shutil.copytree(REPO / "results/demo", tmp_path / "results/demo")
    (tmp_path / "page.md").write_text(f"before\n{BEGIN}{END}after\n")
    return tmp_path


def update(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPO / "scripts/quantmill", "report.update_readme", "page.md", "results/demo", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def rows(folder: Path) -> list[list[str]]:
    """Return the cells of the page's table, its heading first."""
    lines = (folder / "page.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_short_table_has_six_columns(folder: Path) -> None:
    assert update(folder, "--short").returncode == 0
    heading, _, *short = rows(folder)
    assert heading == SIX
    assert update(folder).returncode == 0
    columns, _, *long = rows(folder)
    assert len(columns) > len(SIX)
    assert short == [[row[columns.index(name)] for name in SIX] for row in long]
    assert [row[0] for row in long][:2] == ["`fp16`", "`ct2-int8`"]
    text = (folder / "page.md").read_text()
    assert text.startswith(f"before\n{BEGIN}") and text.endswith(f"\n{END}after\n")


def test_an_engine_that_does_not_tell_what_it_reads(folder: Path) -> None:
    """On a GPU, where the share of the bandwidth is shown."""
    path = folder / "results/demo/results.json"
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row["device_details"]["device"] = "cuda"
    content["rows"][1]["bandwidth_fraction"] = None
    path.write_text(json.dumps(content))
    result = update(folder)
    assert result.returncode == 0, result.stderr
    heading, _, first, second, *_ = rows(folder)
    place = heading.index("of the bandwidth")
    assert first[place].endswith("%") and not second[place].endswith("%")


def test_check_changes_nothing_and_fails_where_the_table_drifted(folder: Path) -> None:
    assert update(folder).returncode == 0
    assert update(folder, "--check").returncode == 0
    drifted = (folder / "page.md").read_text().replace("transformers", "transformer")
    (folder / "page.md").write_text(drifted)
    result = update(folder, "--check")
    assert result.returncode == 1
    assert result.stderr == "error: page.md: its tables or figures are not what the runs measured; run make readme\n"
    assert (folder / "page.md").read_text() == drifted


def test_a_page_without_markers_is_one_line(folder: Path) -> None:
    (folder / "page.md").write_text("nothing\n")
    result = update(folder)
    assert result.returncode == 1
    assert result.stderr.startswith("error: page.md: lacks the markers ") and result.stderr.count("\n") == 1
    assert (folder / "page.md").read_text() == "nothing\n"


def test_sentences_quote_figures_of_the_run(folder: Path) -> None:
    rows = {row["format"]: row for row in json.loads((folder / "results/demo/results.json").read_text())["rows"]}
    fast, slow = (rows[name]["tokens_per_second"] for name in ("ct2-int8", "fp16"))
    page = f"{BEGIN}{END}<!-- results/demo ct2-int8 / fp16 tokens_per_second -->9<!-- end --> times, "
    page += (
        "<!-- results/demo demo:fp16 perplexity -->?<!-- end -->, <!-- results/demo fp16 size_bytes --><!-- end -->."
    )
    (folder / "page.md").write_text(page)
    assert update(folder).returncode == 0
    ratio, perplexity, size = re.findall("-->([^<]*)<!-- end -->", (folder / "page.md").read_text())[-3:]
    assert float(ratio) == pytest.approx(fast / slow, rel=5e-3)
    assert float(perplexity) == pytest.approx(rows["fp16"]["perplexity"], rel=5e-4)
    assert size == f"{rows['fp16']['size_bytes'] / 1e6:.1f} MB"
    assert update(folder, "--check").returncode == 0


@pytest.mark.parametrize(
    ("quote", "fault"),
    [
        ("results/demo nothing perplexity", "'nothing'"),
        ("results/demo fp16 nothing", "'nothing'"),
        ("results/demo fp16 artifact.nothing", "'nothing'"),
        ("results/demo fp16 joules_per_token", "was not measured"),
        ("results/demo fp16 / ct2-int8 joules_per_token", "was not measured"),
        ("results/demo ct2-int8 / fp16 nll_difference", "float division by zero"),
        ("results/demo fp16 / ct2-int8 engine", "unsupported operand type(s) for /: 'str' and 'str'"),
    ],
)
def test_an_unknown_quote_is_one_line(folder: Path, quote: str, fault: str) -> None:
    (folder / "page.md").write_text(f"{BEGIN}{END}<!-- {quote} -->1<!-- end -->")
    result = update(folder)
    assert result.returncode == 1
    assert result.stderr == f"error: <!-- {quote} -->: there is no such figure ({fault}); correct the quote\n"


def test_a_table_of_chosen_columns(folder: Path) -> None:
    quote = "<!-- results/demo by bits_per_weight: perplexity_ratio size_bytes -->\n<!-- end -->"
    (folder / "page.md").write_text(f"{BEGIN}{END}{quote}")
    for _ in range(2):
        assert update(folder).returncode == 0
        heading, _, *found = rows(folder)[-8:]
        assert heading == ["row", "bits per weight", "perplexity over the reference's", "size"]
        assert [row[0] for row in found][:2] == ["`mlc-q4f16_1`", "`awq-int4`"]
        assert [float(row[1]) for row in found] == sorted(float(row[1]) for row in found)
        assert [row[2] for row in found if row[0] == "`fp16`"] == ["1"]


def test_a_file_of_rows_is_a_table(folder: Path) -> None:
    (folder / "results/other.json").write_text(json.dumps([{"name": "a", "figure": 1.5}, {"name": "b", "figure": 2}]))
    (folder / "page.md").write_text(f"{BEGIN}{END}<!-- results/other.json: by make readme -->\n{END}")
    assert update(folder, "results/other.json").returncode == 0
    assert rows(folder)[-4:] == [["name", "figure"], ["---", "---"], ["a", "1.5"], ["b", "2"]]


@pytest.mark.parametrize("quote", ["<!-- results/demo fp16 -->1<!-- end -->", "<!-- results/demo fp16 perplexity -->1"])
def test_a_quote_that_cannot_be_read_is_one_line(folder: Path, quote: str) -> None:
    (folder / "page.md").write_text(f"{BEGIN}{END}{quote}")
    result = update(folder)
    assert result.returncode == 1
    assert result.stderr.startswith("error: <!-- results/demo fp16") and result.stderr.count("\n") == 1
    assert "is not a quote" in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory; correct the page's marker"),
        ('{"schema_version": 4, "rows": [{"mod', "is damaged"),
        ("[]", "is damaged"),
        ("[" * 100_000, "is damaged (nested too deep)"),
        ('{"rows": [{"format": "fp16"}]}', "there is no such figure"),
    ],
)
def test_a_damaged_run_is_one_line(folder: Path, content: str | None, words: str) -> None:
    (folder / "results/other").mkdir()
    if content is not None:
        (folder / "results/other/results.json").write_text(content)
    (folder / "page.md").write_text(f"{BEGIN}{END}<!-- results/other fp16 perplexity -->1<!-- end -->")
    before = (folder / "page.md").read_bytes()
    result = update(folder)
    assert result.returncode == 1
    assert words in result.stderr and result.stderr.count("\n") == 1
    assert (folder / "page.md").read_bytes() == before


@pytest.mark.parametrize("content", ['[{"name": "a"', "[]", '{"name": 1}', '[{"name": "a"}, {"figure": 1}]'])
def test_a_damaged_file_of_rows_is_one_line(folder: Path, content: str) -> None:
    (folder / "results/other.json").write_text(content)
    (folder / "page.md").write_text(f"{BEGIN}{END}<!-- results/other.json: by make readme -->\n{END}")
    result = update(folder, "results/other.json")
    assert result.returncode == 1
    assert (
        result.stderr.startswith("error: results/other.json: is not a table of rows") and result.stderr.count("\n") == 1
    )


def test_a_lost_end_marker_keeps_the_text_below(folder: Path) -> None:
    (folder / "page.md").write_text(f"{BEGIN}text that stays <!-- results/demo fp16 perplexity -->1<!-- end -->\n")
    before = (folder / "page.md").read_bytes()
    result = update(folder)
    assert result.returncode == 1
    assert "lacks the markers" in result.stderr and result.stderr.count("\n") == 1
    assert (folder / "page.md").read_bytes() == before


def test_a_row_is_quoted_by_its_model(folder: Path) -> None:
    path = folder / "results/demo/results.json"
    content = json.loads(path.read_text())
    (row,) = (row for row in content["rows"] if row["format"] == "fp16")
    content["rows"].append(row | {"model": "other", "size_bytes": 5_000_000})
    path.write_text(json.dumps(content))
    quote = "<!-- results/demo {}fp16 size_bytes -->1<!-- end -->"
    (folder / "page.md").write_text(f"{BEGIN}{END}{quote.format('')}")
    assert "there is no such figure ('fp16')" in update(folder).stderr
    (folder / "page.md").write_text(f"{BEGIN}{END}{quote.format('other:')}")
    assert update(folder).returncode == 0
    assert (folder / "page.md").read_text().endswith("-->5 MB<!-- end -->")


def test_nested_figures_are_quoted_by_their_path(folder: Path) -> None:
    path = folder / "results/demo/results.json"
    content = json.loads(path.read_text())
    (row,) = (row for row in content["rows"] if row["format"] == "ct2-int8")
    row["artifact"]["gate"]["faithful"]["divergence"] = 0.012345
    path.write_text(json.dumps(content))
    quote = "<!-- results/demo ct2-int8 artifact.gate.faithful.divergence -->1<!-- end -->"
    (folder / "page.md").write_text(f"{BEGIN}{END}{quote}")
    assert update(folder).returncode == 0
    assert (folder / "page.md").read_text().endswith("-->0.0123<!-- end -->")
    assert update(folder, "--check").returncode == 0


def test_scores_of_tasks_are_quoted_as_columns_are(folder: Path) -> None:
    path = folder / "results/demo/results.json"
    content = json.loads(path.read_text())
    entry = dict.fromkeys((*tasks.KEPT, *tasks.COUNTS, *tasks.PAIRED)) | {"task": "own-task", "missing": {}}
    entry |= {"metric": "acc", "higher_is_better": True, "share": True}
    names = [{each: row[each] for each in ("model", "format", "run")} for row in content["rows"][:2]]
    content["tasks"] = [entry | name | {"score": score} for name, score in zip(names, (0.75, 0.5), strict=True)]
    path.write_text(json.dumps(content))
    first, second = (name["format"] for name in names)
    quotes = (
        f"<!-- results/demo {second} / {first} task_own_task_score -->1<!-- end -->\n"
        "<!-- results/demo by task_own_task_score: size_bytes -->\n<!-- end -->"
    )
    (folder / "page.md").write_text(f"{BEGIN}{END}{quotes}")
    assert update(folder).returncode == 0
    text = (folder / "page.md").read_text()
    assert "-->0.667<!-- end -->" in text
    lines = [line for line in text.splitlines() if line.startswith(("| row", f"| `{first}`", f"| `{second}`"))][-3:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| row", "own-task"],
        [f"| `{second}`", "50%"],
        [f"| `{first}`", "75%"],
    ]


def test_a_figure_of_any_file(folder: Path) -> None:
    content = {"summary": {"perplexity": 21.7654, "name": "x"}, "batches": [{"rate": 3}, {"rate": 59}]}
    (folder / "results/a.json").write_text(json.dumps(content))
    for keys, figure in (("summary.perplexity", "21.77"), ("batches.1.rate", "59")):
        (folder / "page.md").write_text(f"{BEGIN}{END}<!-- results/a.json {keys} -->1<!-- end -->")
        assert update(folder).returncode == 0
        assert (folder / "page.md").read_text().endswith(f"-->{figure}<!-- end -->")
    missing = ("summary.nothing", "summary.name", "nothing", "summary.perplexity.more", "batches.2.rate", "batches.x")
    for keys in missing:
        (folder / "page.md").write_text(f"{BEGIN}{END}<!-- results/a.json {keys} -->1<!-- end -->")
        result = update(folder)
        assert result.returncode == 1
        assert "there is no such figure" in result.stderr and result.stderr.count("\n") == 1


def test_a_row_without_speed_shows_its_quality(folder: Path) -> None:
    shutil.copytree(REPO / "results/smollm2-libraries", folder / "results/demo", dirs_exist_ok=True)
    assert update(folder).returncode == 0
    heading, _, *found = rows(folder)
    (row,) = (dict(zip(heading, row, strict=True)) for row in found if row[0] == "`ct-w4a16`")
    assert row["tokens/s (95%)"] == MISSING
    assert row["perplexity"] == "29.45"
    path = folder / "results/demo/results.json"
    content = json.loads(path.read_text())
    for each in content["rows"]:
        each["protocol"]["latency"] = None
    path.write_text(json.dumps(content))
    assert update(folder).stderr == "error: results.json: the speed of no row was measured\n"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tokens_per_event", 2.41, "2.41"),
        ("preemptions", 3.0, "3"),
        ("slo_attainment", 0.925, "92.5%"),
        ("bandwidth_fraction", 0.61, "61%"),
    ],
)
def test_shares_are_percentages_and_other_numbers_are_not(name: str, value: float, said: str) -> None:
    (column,) = (column for column in LOAD_COLUMNS if column.name == name)
    assert markdown.cell(column, value) == said


def test_a_hub_text_is_named_by_its_dataset() -> None:
    row = {"model": "m", "quality_totals": {"scored_tokens": 1000}, "protocol": {"quality": {"text_sha256": "ab" * 32}}}
    for text, said in (
        ("own/text.txt", "text.txt"),
        ({"hub": "acme/wiki", "file": "a/test.parquet"}, "acme/wiki/a/test.parquet"),
    ):
        config = {"models": {"m": {"texts": {"evaluation": text}}}}
        assert (
            page_header.text(row, row["protocol"]["quality"], config)
            == f"{said} (SHA-256 abababab), 1,000 tokens scored"
        )
