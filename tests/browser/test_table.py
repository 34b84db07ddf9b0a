"""Actions of a reader on the table of rows, in a real Chromium; its figures are those of conftest.py."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from conftest import HOSTILE, build, column, write_cell
from playwright.sync_api import Locator, Page, expect

Visit = Callable[..., Page]


def answer(page: Page, button: Locator) -> str:
    """Return what a click on a question says; a second click closes it."""
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    said = page.locator("#explanation").inner_text()
    button.click()
    expect(button).to_have_attribute("aria-expanded", "false")
    expect(page.locator("#explanation")).to_be_hidden()
    return said


def test_sorting_by_pointer_and_by_keyboard(study: Path, visit: Visit) -> None:
    page = visit(study)
    assert column(page, "format") == ["reference", "quick", "small", "coarse", "poor", "reference", "broken"]
    page.click("#sort-tokens_per_second")
    assert column(page, "tokens_per_second") == ["50", "100", "100", "200", "300", "900", "failed"]
    header = page.locator("th", has=page.locator("#sort-tokens_per_second"))
    expect(header).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("#sort-tokens_per_second")).to_be_focused()
    page.keyboard.press("Enter")
    expect(header).to_have_attribute("aria-sort", "descending")
    assert column(page, "tokens_per_second") == [
        "900",
        "300",
        "200",
        "100",
        "100",
        "50",
        "failed",
    ]  # missing stays last
    page.click("#sort-format")
    assert column(page, "format")[:2] == ["broken", "coarse"]


def test_filters_and_columns(study: Path, visit: Visit) -> None:
    page = visit(study)
    page.fill("#filter", "FIRST small")
    assert column(page, "format") == ["small"]
    page.fill("#filter", "")
    page.check("#front-only")
    assert column(page, "format") == ["reference", "quick", "coarse", "reference"]
    few = page.locator("#table thead th").count()
    page.check("#all-columns")
    with (study.parent / "results.csv").open() as file:
        names = next(csv.reader(file))
    assert page.locator("#table thead th").count() == len(names) > few
    for button in page.locator("#table thead th .help").all():
        assert len(answer(page, button)) > 15  # every column says what it is


def test_a_failed_cell_says_why(study: Path, visit: Visit) -> None:
    page = visit(study)
    failed = page.locator("#table tbody tr", has_text="broken").locator("td.empty button").first
    expect(failed).to_have_text("failed")
    assert answer(page, failed) == f"failed: the engine {HOSTILE} broke"
    notice = page.locator("#notices .notice")
    expect(notice).to_have_count(1)
    expect(notice).to_contain_text("Not complete: 1 of 7 rows (a model in a format) failed.")
    expect(notice.locator("li")).to_have_text(f"{HOSTILE}/broken: failed: the engine {HOSTILE} broke")
    expect(notice.locator("pre")).to_have_text("snakemake report --cores 8")
    above = page.locator("main > *").first
    expect(above).to_have_attribute("id", "notices")  # above the verdict


def test_disturbed_rows_come_first_with_a_command(caveats: Path, visit: Visit) -> None:
    page = visit(caveats)
    notice = page.locator("#notices .notice", has_text="disturbed")
    expect(notice).to_contain_text("1 of 2 rows was disturbed while its speed was measured.")
    expect(notice.locator("li")).to_have_text("only/doubtful: a neighbour")
    command = notice.locator("pre").inner_text()
    assert command.startswith("snakemake report --cores 8 --forcerun ")
    assert [Path(file).parts[-2:] for file in command.split()[5:]] == [("doubtful", "latency.json")]
    notice.get_by_role("button", name="copy the command").click()
    expect(notice.get_by_role("status")).to_have_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == command
    assert "disturbed" in page.locator("#table tbody tr", has_text="doubtful").inner_text()


def test_a_row_shows_its_warnings_gate_and_group_size(tmp_path: Path, visit: Visit) -> None:
    loop, text = [1, 2] * 20, [place % 5 for place in range(38)] + [3, 3]
    rows = {"reference": [text, loop, text, text, text], "looping": [loop] * 5}
    cells = [write_cell(tmp_path, "m", name, 100, 1, 10**6, each, seen=False) for name, each in rows.items()]
    gate = {
        "perplexity": 5.5,
        "reference": 5.25,
        "faithful": {"divergence": 0.001, "tolerance": 0.125, "against": "its weights"},
    }
    for cell, change in (
        (cells[0], {"gate": {"faithful": {"unchecked": f"no {HOSTILE}"}}}),
        (cells[1], {"gate": gate, "parameters": {"q_group_size": 64}}),
    ):
        path = Path(cell["artifact"], "quantmill.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    page = visit(build(tmp_path, ["m"], cells))
    warnings = page.locator("#table tbody").get_by_role("button", name="warning")
    assert [answer(page, warnings.nth(i)) for i in range(2)] == [
        f"not checked against its own weights: no {HOSTILE}",
        "falls into a loop after 5 of 5 prompts, reference after 1 (95% interval of the difference +2% to +96%)",
    ]
    expect(page.locator("#notes")).to_have_text(
        "A habit of m: decoded greedily, reference falls into a loop after 1 of 5 prompts. A format is marked only if "
        "it does so significantly more often."
    )
    heights = page.locator("#table tbody tr").evaluate_all("(all) => all.map((each) => each.offsetHeight)")
    line = page.locator("#table tbody th").first.evaluate("(each) => parseFloat(getComputedStyle(each).lineHeight)")
    assert max(heights) < 3 * line  # two lines at most
    assert [cell.strip() for cell in page.locator("#table td", has_text="groups of").all_inner_texts()] == [
        "8\ngroups of 64"
    ]
    page.check("#all-columns")
    assert column(page, "group_size") == ["\u2013", "64"]
    page.locator("#provenance summary", has_text="m/looping").click()
    for words in ("5.5", "5.25", "divergence", "0.001", "tolerance", "0.125", "against", "its weights"):
        expect(page.locator("#provenance details", has_text="m/looping")).to_contain_text(words)
    loops = "repeats itself from token 1 to its end"
    habit = f"{loops}, as reference does from token 1 on: the model's own habit"
    for number, expected in enumerate(({"looping": loops}, {"reference": loops, "looping": habit})):
        prompt = page.locator("#details details", has_text=f"{number + 1}. prompt")
        prompt.locator("summary").click()
        expect(prompt.locator(".sides > div")).to_have_count(2)
        sides = {side.locator("h3").inner_text().split()[0]: side for side in prompt.locator(".sides > div").all()}
        found = {name: side.locator(".warning").all_inner_texts() for name, side in sides.items()}
        assert {name: texts[0].strip() for name, texts in found.items() if texts} == expected


def test_every_caveat_of_a_row_is_told(caveats: Path, visit: Visit) -> None:
    page = visit(caveats)
    said = page.locator("#verdict").inner_text()
    assert "On a processor:" in said and "doubtful is the only format that was measured: at least 285 tokens/s." in said
    assert "Its speed was disturbed." in said
    assert "On another processor:" in said and "times" not in said
    why = page.locator("#table td button", has_text="disturbed")
    expect(why).to_have_count(1)
    why.focus()
    expect(why).to_be_focused()
    assert (
        answer(page, why)
        == "a neighbour; captured (Quantmill's own CUDA graph): 1 tokens/s, refused: its tokens differ"
    )
    prompt = page.locator("#details details", has_text="1. prompt")
    prompt.locator("summary").click()
    expect(prompt.locator("h3").first).to_have_text("doubtful nothing to compare it with")
    page.locator("#details summary", has_text="Longer prompts").click()
    expect(page.locator("#details li", has_text="a prompt of 512")).to_contain_text("refused: by 0.9 nats")
    assert "The weights are random" not in page.locator("#details").inner_text()


def test_where_a_row_comes_from(study: Path, visit: Visit) -> None:
    page = visit(study)
    entry = page.locator("#provenance details", has_text="first/small")
    entry.locator("summary").click()
    expect(entry.locator("pre")).to_have_text("snakemake --cores 8 --force artifacts/first/small")
    expect(entry).to_contain_text(HOSTILE)  # the tool's version
    expect(entry).to_contain_text("a processor")
    page.select_option("#model", HOSTILE)
    expect(page.locator("#provenance details").first).to_contain_text(f"{HOSTILE}/reference")
