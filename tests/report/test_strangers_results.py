"""results.json of strangers: whatever the file holds, the programs that read it finish or say in one line what is
wrong, and where."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from run_fixtures import Run

from quantmill.common.program import UserError
from quantmill.report import reading

Change = Callable[[Run], object]


def row(content: Run) -> dict[str, Any]:
    """Return a row with a speed and a quality."""
    return content["rows"][1]


def deep(content: Run) -> None:
    inner: list[Any] = []
    for _ in range(60):
        inner = [inner]
    content["config"]["deep"] = inner


def windows(name: str, value: Any) -> Change:
    return lambda content: row(content)["quality_windows"].update({name: value})


def figures(**values: Any) -> Change:
    return lambda content: row(content).update(values)


WRONG: dict[str, tuple[Change, str]] = {
    "a number of 401 digits": (figures(perplexity=10**400), "rows.1.perplexity: is a whole number beyond 2^53"),
    "a size beyond what float64 holds": (
        figures(size_bytes=2**53 + 1),
        "rows.1.size_bytes: is a whole number beyond 2^53",
    ),
    "a rate that float64 rounds": (figures(tokens_per_second=2**63 - 1), "beyond 2^53"),
    "1e308": (figures(perplexity=1e308), "rows.1.perplexity: is 1e+308, and no figure is above 1e+60"),
    "-1e308": (windows("nll", [-1e308] * 30), "rows.1.quality_windows.nll.0: is -1e+308"),
    "a rate of nothing": (figures(tokens_per_second_low=5e-324), "0.0 is less than or equal to the minimum of 0"),
    "an integer with a point": (figures(size_bytes=1e30), "rows.1.size_bytes: 1e+30 is not of type 'integer'"),
    "null totals": (figures(quality_totals=None), "rows.1.quality_totals: is null, and perplexity is not"),
    "no summary": (figures(latency_summary=None), "rows.1.latency_summary: is null, and device is not"),
    "no end of an interval": (figures(tokens_per_second_high=None), "rows.1.tokens_per_second_high: is null, and"),
    "an interval turned round": (figures(tokens_per_second_low=999.0), "rows.1.tokens_per_second_low: is above"),
    "no windows": (windows("nll", []), "rows.1.quality_windows.nll: [] "),
    "a window less": (windows("kld", [1.0] * 29), "rows.1.quality_windows.kld: has 29 entries, and protocol.quality"),
    "windows of no words": (windows("counts", [0] * 30), "rows.1.quality_windows.counts.0: 0 is less than or equal"),
    "windows of no tokens": (
        windows("tokens", [0] * 30),
        "rows.1.quality_windows.tokens.0: 0 is less than the minimum",
    ),
    "nats that no model has": (windows("nll", [1e9] * 30), "rows.1.quality_windows.nll: has 1e+09 nats for 50 tokens"),
    "divergence of no windows": (
        lambda content: row(content)["quality_windows"].pop("kld"),
        "rows.1.quality_windows.kld: is missing, and kld_mean is not",
    ),
    "other words": (windows("counts", [51.0] * 30), "rows.1.quality_windows.counts: other than those of "),
    "half a character": (figures(device="\ud800"), "rows.1.device: is a text with half a character"),
    "half a character in a key": (figures(versions={"\udc00": "1"}), "rows.1.versions.a key: is a text with half a"),
    "a text without an end": (figures(mode="a" * 20_001), "rows.1.mode: is a text of 20001 characters, and 20000"),
    "no models": (lambda content: content["config"].update(models={}), "config.models: {} "),
    "no rows": (lambda content: content.update(rows=[]), "rows: [] "),
    "more pairs than can be compared": (
        lambda content: content.update(rows=[row(content)] * 300),
        "rows: 300 rows of 'm', of 30 windows, are too many to compare",
    ),
    "a text from nowhere": (
        lambda content: content["config"]["models"]["m"].update(texts={"evaluation": {"hub": "a/b"}}),
        "config.models.m.texts.evaluation: 'file' is a required property",
    ),
    "too deep": (deep, "is nested more than 50 deep"),
    "a ratio of nothing": (
        lambda content: row(content)["perplexity_ratio"].update(ratio=1e-200),
        "rows.1.perplexity_ratio.ratio: 0.0 is less than or equal to the minimum of 0",
    ),
    "a protocol without its window": (
        lambda content: row(content)["protocol"]["quality"].pop("window"),
        "rows.1.protocol.quality: 'window' is a required property",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_with_its_place(before: Run, tmp_path: Path, name: str) -> None:
    change, said = WRONG[name]
    change(before)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(before))
    with pytest.raises(UserError) as error:
        reading.read_results(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value).replace(f"{path}: ", "", 1)
    assert str(error.value).isprintable()


def test_a_good_file_is_read_unchanged(before: Run, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(before))
    assert reading.read_results(path) == before
    empty = next(name for name, why in before["rows"][2]["missing"].items() if why == "random weights")
    del before["rows"][2]["missing"][empty]
    path.write_text(json.dumps(before))
    assert reading.read_results(path)["rows"][2]["missing"][empty] == "the file does not say why"


@pytest.mark.parametrize("path", sorted(REPO.glob("results/*/results.json")), ids=lambda path: path.parent.name)
def test_recorded_runs_are_read(path: Path) -> None:
    recorded = json.loads(path.read_text())
    assert [each["model"] for each in reading.read_results(path)["rows"]] == [
        each["model"] for each in recorded["rows"]
    ]


def test_two_files_that_count_words_differently(before: Run, after: Run, compare: Callable, tmp_path: Path) -> None:
    for each in after["rows"][:2]:
        each["quality_windows"]["counts"] = [1e-3] * 30
        each["quality_windows"]["nll"] = [0.1] * 30
    result = compare(before, after)
    assert result.returncode == 2
    assert "after.json: rows.0.quality_windows.counts: other than those of " in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_randomly_changed_file_is_shown_or_refused(tools_python: Path, call: Callable, seed: int) -> None:
    """With a page and with a collection: 100 ends of each seed."""
    result = call(tools_python, "tests/report/results_fuzz.py", str(seed), "50")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found.keys() == {"finished", "refused"}, found
    assert min(found.values()) > 20
