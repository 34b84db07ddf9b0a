"""The page for a first reader, at a desk and on a telephone; figures are conftest.py's."""

import itertools
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import METRICS_VERSION, SUMMARY, build, write_cell
from playwright.sync_api import Locator, Page, expect

Visit = Callable[..., Page]
DESK = {"viewport": {"width": 1300, "height": 900}}
TELEPHONE = {"viewport": {"width": 400, "height": 800}, "has_touch": True}
OUTPUT = [1, 2, 3, 4]


def edit(path: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(Path(path).read_text())
    change(content)
    Path(path).write_text(json.dumps(content))


def write(folder: Path) -> list[dict[str, Any]]:
    """One model: the reference and a run of it, captured; Quantmill's own kernels; a tie; somebody else's artifact."""
    rows = {"reference": (100, 1), "again": (110, 1), "own": (300, 1.005), "even": (120, 1.004), "theirs": (90, 1.03)}
    cells = {
        name: write_cell(folder, "only", name, rate, ratio, 10**6, [OUTPUT], seen=True)
        for name, (rate, ratio) in rows.items()
    }
    plain = {"mode": "generate", "refused": None, "summary": dict.fromkeys(SUMMARY, 55.0)}
    edit(cells["again"]["latency"], lambda each: each.update(mode="captured", other_modes=[plain]))
    cells["again"] |= {"format": "reference", "run": "graph", "options": {"attn_implementation": "eager"}}
    for part in ("latency", "quality"):
        edit(cells["again"][part], lambda each: each.update(options={"attn_implementation": "eager"}))
    cells["own"]["engine"] = "quantmill-tvm"
    sway = lambda nll: [value + 20 * (-1) ** i for i, value in enumerate(nll)]  # noqa: E731
    edit(cells["even"]["quality"], lambda each: each["windows"].update(nll=sway(each["windows"]["nll"])))
    cells["theirs"]["prebuilt"] = True
    for cell in cells.values():
        skipped = {"tokens": 512, "new_tokens": 4, "skipped": "it exceeds the model's context"}
        edit(cell["latency"], lambda each, skipped=skipped: each.update(lengths=[skipped]))
    return list(cells.values())


@pytest.fixture(scope="module")
def only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("only")
    return build(folder, ["only"], write(folder))


def row(page: Page, name: str) -> Locator:
    return page.locator("#table tbody tr").filter(has=page.locator("th").get_by_text(name, exact=True))


def box(locator: Locator) -> dict[str, float]:
    found = locator.bounding_box()
    assert found
    return found


def end(locator: Locator) -> float:
    return box(locator)["x"] + box(locator)["width"]


def test_the_header_says_under_which_conditions_the_figures_hold(study: Path, only: Path, visit: Visit) -> None:
    page = visit(only)
    assert page.locator("h1").inner_text() == "only: quality versus speed"
    dated = datetime.fromtimestamp(only.parent.stat().st_mtime, UTC)
    names, values = (page.locator(f".facts {part}").all_inner_texts() for part in ("dt", "dd"))
    found = dict(zip(names, values, strict=True))
    assert found.pop("Quantmill").endswith(f", metrics version {METRICS_VERSION}")
    assert found == {
        "device": "a processor",
        "threads": "2",
        "load": "batch 1, 4 new tokens after each prompt, 1 process, 1 repeat",
        "text": "evaluation text (SHA-256 x), 800 tokens scored",
        "protocol": "gptq-2048",
        "versions": "lib 1.0",
        "results dated": f"{dated:%Y-%m-%d}",
    }
    assert visit(study).locator("h1").inner_text() == "Quality versus speed"  # of two models


def test_the_sentence_comes_before_plot_and_table(only: Path, visit: Visit) -> None:
    page = visit(only, **DESK)
    tops = [box(page.locator(f"#{name}"))["y"] for name in ("verdict", "plot", "table")]
    assert tops == sorted(tops)
    first = page.locator("#verdict li").first
    assert first.inner_text().startswith("even is the fastest of those within 1%: 120 tokens/s")
    assert box(first)["y"] + box(first)["height"] < 400  # in the upper half of the first screen


def test_the_table_shows_the_paired_interval_of_perplexity(study: Path, visit: Visit) -> None:
    page = visit(study, **DESK)
    cells = page.locator("#table td", has_text="% to ").all_inner_texts()
    assert cells[:2] == ["2.01 +0.5%\n+0.5% to +0.5%", "2.016 +0.8%\n+0.8% to +0.8%"]
    text = page.locator("#table").inner_text()
    assert "the reference" in text
    assert "1.5 to 4" not in text
    page.check("#all-columns")
    assert page.locator("#sort-perplexity_low").count() == 1


def test_models_stand_below_the_name(study: Path, only: Path, visit: Visit) -> None:
    page = visit(only, **DESK)
    page.check("#all-columns")
    assert page.locator("#sort-model").count() == 0
    assert "only" not in page.locator("#table tbody th").first.inner_text()
    assert page.locator("#model").is_hidden()
    page = visit(study, **DESK)
    assert page.locator("#sort-model").count() == 0
    assert page.locator("#table tbody th").first.inner_text().split("\n")[:2] == [
        "reference",
        "first: fake, float16, plain, 2 threads",
    ]
    page.check("#all-columns")
    assert page.locator("#sort-model").count() == 1


def test_no_column_is_cut_without_a_hint(study: Path, visit: Visit) -> None:
    page = visit(study, **DESK)
    scroll, hint = page.locator("#scroll"), page.locator("#width-note")
    assert scroll.evaluate("(each) => each.scrollWidth - each.clientWidth") == 0
    expect(hint).to_be_hidden()
    page.check("#all-columns")
    right = box(scroll)["x"] + box(scroll)["width"]
    cut = [
        each for each in page.locator("#table thead th").all() if sum(map(box(each).get, ("x", "width"))) > right + 1
    ]
    assert len(cut) > 5
    expect(hint).to_have_text(f"{len(cut)} more columns to the right: move the table sideways to see them.")
    top = box(scroll)["y"]
    before = [box(page.locator("#table").locator(part).first)["x"] for part in ("thead th", "tbody th")]
    scroll.evaluate("(each) => each.scrollTo(each.scrollWidth, 0)")
    expect(hint).to_be_hidden()
    assert box(scroll)["y"] == top  # no button moves away while it is clicked
    assert [box(page.locator("#table").locator(part).first)["x"] for part in ("thead th", "tbody th")] == before
    expect(page.locator("#sort-group_size")).to_be_in_viewport()


def test_on_a_telephone_each_row_is_a_card(study: Path, visit: Visit) -> None:
    page = visit(study, **TELEPHONE)
    expect(page.locator("#table thead")).to_have_count(0)
    scroll = page.locator("#scroll")
    assert scroll.evaluate("(each) => each.scrollWidth - each.clientWidth") == 0
    expect(page.locator("#width-note")).to_be_hidden()
    expect(page.locator("#table tbody tr")).to_have_count(7)
    card = row(page, "quick").first
    speed = card.locator("td", has_text="tokens/s")
    assert speed.inner_text().split("\n")[1:] == ["300", "285 to 315"]
    for part in card.locator("td").all():
        assert end(part) <= 400
    page.select_option("#sort", label="tokens/s")
    assert page.locator("#table tbody tr").first.inner_text().startswith("coarse")  # the fastest first
    page.locator("#table tbody tr").first.locator(".help").first.tap()
    asked = page.locator("#explanation")
    assert box(asked)["x"] >= 0
    assert end(asked) <= 400
    page.set_viewport_size({"width": 1300, "height": 900})
    expect(page.locator("#table thead")).to_have_count(1)


def test_nothing_is_shown_by_a_resting_pointer_alone(study: Path, visit: Visit) -> None:
    page = visit(study, **DESK)
    assert page.locator("body [title]").count() == 0
    page.locator("#plot g.mark-symbol.role-mark path").nth(1).click()
    said = page.locator("#explanation")
    for words in ("quick", "300", "a processor"):
        expect(said).to_contain_text(words)
    page.mouse.click(5, 5)
    expect(said).to_be_hidden()


def test_every_figure_has_a_question_that_the_keyboard_reaches(study: Path, visit: Visit) -> None:
    page = visit(study, **DESK)
    headings = ("verdict-heading", "plot-heading", "table-heading")
    asked = [page.locator(f".heading:has(#{name}) .help") for name in headings]
    asked += page.locator("figcaption .help").all() + page.locator("#table thead .help").all()
    assert len(asked) == 3 + 3 + page.locator("#table thead th").count()
    said = page.locator("#explanation")
    texts = []
    for button in asked:
        expect(button).to_have_attribute("aria-expanded", "false")
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-expanded", "true")
        expect(said).to_be_visible()
        texts.append(said.inner_text())
    assert len(set(texts)) == len(texts)  # each says something of its own
    expect(page.locator("[aria-expanded=true]")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(said).to_be_hidden()
    expect(page.locator("[aria-expanded=true]")).to_have_count(0)
    expect(asked[-1]).to_be_focused()
    assert {button.evaluate("(each) => each.tagName") for button in asked} == {"BUTTON"}


def test_the_better_corner_is_marked_on_all_axes(study: Path, visit: Visit) -> None:
    page = visit(study, **DESK)
    corners = {
        ("perplexity", "tokens_per_second"): ("better \u2198", True, False),
        ("top1_agreement", "tokens_per_second"): ("better \u2197", True, True),
        ("perplexity", "size_bytes"): ("\u2199 better", False, False),
        ("top1_agreement", "ttft_ms_p50"): ("\u2196 better", False, True),
    }
    for (quality, cost), (text, right, top) in corners.items():
        page.select_option("#quality", quality)
        page.select_option("#cost", cost)
        mark = page.locator("#plot text", has_text="better").filter(has_text=text)
        expect(mark).to_have_count(1)
        plot, found = box(page.locator("#plot")), box(mark)
        assert (found["x"] > plot["x"] + plot["width"] / 2) is right
        assert (found["y"] < plot["y"] + plot["height"] / 2) is top


def test_rooflines_and_captions_fit_what_is_drawn(study: Path, caveats: Path, visit: Visit) -> None:
    page = visit(study, **DESK)
    note, names = page.locator("#plot-note"), page.locator("#plot text", has_text="roofline of")
    expect(note).to_contain_text("Dashed: the Pareto front.")
    expect(note).to_contain_text("Not drawn, for lack of one of the two figures: 1 of 7 rows.")
    expect(note).not_to_contain_text("Roofline")
    assert names.count() == 0
    page.check("#rooflines")
    expect(note).to_contain_text("Roofline: ")
    expect(names).to_have_count(6)
    labels = [box(each) for each in page.locator("#plot .mark-text text").all() if each.is_visible()]
    assert len(labels) >= 6 + 6
    for one, other in itertools.combinations(labels, 2):
        across = min(sum(map(one.get, ("x", "width"))), sum(map(other.get, ("x", "width")))) - max(one["x"], other["x"])
        along = min(one["y"] + one["height"], other["y"] + other["height"]) - max(one["y"], other["y"])
        assert across < 3 or along < 6  # boxes hold some space above and below their letters
    page = visit(caveats)
    page.select_option("#cost", "size_bytes")
    expect(page.locator("#plot-note")).not_to_contain_text("Dashed")


def test_over_sizes_all_devices_share_a_front(caveats: Path, sizes: Path, visit: Visit) -> None:
    page = visit(sizes, **DESK)
    assert page.locator("#quality").input_value() == "perplexity_loss"  # most rows have no speed
    assert page.locator("#cost").input_value() == "bits_per_weight"
    plot, note = page.locator("#plot"), page.locator("#plot-note")
    for name in ("reference", "timed", "untimed", "small"):
        expect(plot.get_by_text(name, exact=True)).to_be_visible()
    assert plot.locator(".role-legend-label text").all_text_contents() == ["fake", "other"]
    expect(plot.get_by_text("0.3%", exact=True)).to_be_visible()
    expect(note).to_contain_text("Dashed: rows that no other of their model equals or beats")
    front = plot.locator("g.mark-line path").first.get_attribute("d")
    assert (
        front.count("L") == 2
    )  # from `small` over `untimed` to the reference, past `timed`, which is larger and worse
    expect(note).not_to_contain_text("Pale")  # the speed of `timed` was disturbed, not its size
    page.select_option("#cost", "tokens_per_second")
    expect(note).to_contain_text("Not drawn, for lack of one of the two figures: 3 of 4 rows.")
    expect(note).to_contain_text("Pale: disturbed")
    page = visit(caveats, **DESK)
    assert page.locator("#cost").input_value() == "tokens_per_second"


def test_legends_name_what_is_drawn_in_order(study: Path, visit: Visit) -> None:
    page = visit(study, **DESK)
    legends = [
        figure.locator(".role-legend-label text").all_text_contents() for figure in page.locator(".plots figure").all()
    ]
    every = ["reference", "quick", "small", "coarse", "poor"]
    assert legends == [every[1:], every, every]


def test_skipped_prompts_and_passages_of_ties_are_left_out(only: Path, visit: Visit) -> None:
    page = visit(only)
    details = page.locator("#details")
    expect(details.locator("summary", has_text="own: where it is furthest from reference")).to_have_count(1)
    expect(details.locator("summary", has_text="even: where it is furthest")).to_have_count(0)
    assert "exceeds the model's context" not in page.locator("body").inner_text()
    expect(details.locator("summary", has_text="Longer prompts")).to_have_count(0)


def test_a_row_says_its_run_and_origin(only: Path, visit: Visit) -> None:
    page = visit(only, **DESK)
    names = page.locator("#table tbody th").evaluate_all("(all) => all.map((each) => each.firstChild.textContent)")
    assert names == ["reference", "reference@graph", "own", "even", "theirs"]
    graph = row(page, "reference@graph").inner_text()
    assert "captured (Quantmill's own CUDA graph)" in graph
    assert graph.split("\t")[2].strip() == "55\n55 to 55"  # deployed: by the library's own generate
    row(page, "reference@graph").get_by_role("button", name="own").click()
    expect(page.locator("#explanation")).to_contain_text("decoded by Quantmill's CUDA graph")
    expect(page.locator("#explanation")).to_contain_text("generate: 55 tokens/s")
    own = row(page, "own").locator("th").inner_text()
    assert "quantmill-tvm (Quantmill's own kernels, not MLC-LLM)" in own
    left = "Not ranked, since no deployment has these speeds: own (MLC-LLM was not run; docs/MLC.md says how)."
    assert left in page.locator("#verdict").inner_text()
    row(page, "theirs").get_by_role("button", name="warning").click()
    expect(page.locator("#explanation")).to_contain_text("not built here")
    assert page.locator("#table").get_by_role("button", name="warning").count() == 1
    plot = page.locator("#plot")
    expect(plot.get_by_text("reference@graph", exact=True)).to_have_count(1)
    legend = page.locator(".plots figure").nth(1).locator(".role-legend-label text").all_text_contents()
    assert legend == names
    entry = page.locator("#provenance details", has_text="only/theirs")
    entry.locator("summary").click()
    expect(entry).to_contain_text("Not built here; fetched again by")
    entry = page.locator("#provenance details", has_text="only/reference@graph")
    entry.locator("summary").click()
    expect(entry).to_contain_text("attn_implementationeager")
    prompt = page.locator("#details details", has_text="1. prompt")
    prompt.locator("summary").click()
    expect(prompt.locator(".sides > div")).to_have_count(5)


def test_a_page_still_being_filled_reloads_itself(only: Path, tmp_path: Path, visit: Visit) -> None:
    cells = write(tmp_path)
    pending = [cells[-1][part] for part in ("latency", "quality")]
    page = visit(build(tmp_path, ["only"], cells, pending=pending))
    notice = page.locator("#notices .notice").first
    expect(notice).to_contain_text("Still running; this page fills itself in.")
    expect(notice.locator("li")).to_have_text("only/theirs: latency, quality")
    shutil.copy(only, tmp_path / "report" / "index.html")
    expect(page.locator("#notices .notice")).to_have_count(0, timeout=15_000)
    assert page.locator("meta[http-equiv=refresh]").count() == 0
