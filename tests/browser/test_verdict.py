"""Every sentence of the verdict, and the notices above it, with results that tempt them to be wrong."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import TOKENS, WINDOWS, build, write_cell
from playwright.sync_api import Page

Visit = Callable[..., Page]


@dataclass
class Row:
    """A format: tokens a second (its interval is 5% either way; None: not measured), perplexity over the reference's
    (None: not scored), MB. `wobble`: how much its windows differ from the reference's, in nats of 100 tokens, up and
    down by turns: 20 is a tie. `noise`: below the noise floor; `loud`: disturbed; `loops`: of its four texts."""

    rate: float | None
    ratio: float | None = 1.0
    size: float = 10.0
    wobble: float = 0.0
    noise: bool = False
    loud: bool = False
    loops: int = 0
    device: str = "a processor"
    gate: Any = None


def edit(path: str, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(Path(path).read_text())
    change(content)
    Path(path).write_text(json.dumps(content))


def write(folder: Path, model: str, name: str, row: Row) -> dict[str, Any]:
    loop, text = [5] * 40, list(range(40))
    outputs = [loop if i < row.loops else text for i in range(4)]
    figures = row.rate or 1.0, row.ratio or 1.0, int(row.size * 10**6)
    cell = write_cell(folder, model, name, *figures, outputs, seen=False)

    def latency(content: dict[str, Any]) -> None:
        content["interference"] = ["a neighbour"] if row.loud else []
        content["device"]["name"] = row.device

    def quality(content: dict[str, Any]) -> None:
        nll = content["windows"]["nll"]
        content["windows"]["nll"] = [value + row.wobble * (-1) ** i for i, value in enumerate(nll)]
        content["windows"]["kld"] = [TOKENS * (1e-6 if row.noise else 1e-2)] * WINDOWS

    edit(cell["latency"], latency)
    edit(cell["quality"], quality)
    edit(f"{cell['artifact']}/quantmill.json", lambda content: content.update(gate=row.gate))
    if row.ratio is None:
        Path(cell["quality"]).unlink()
    if row.rate is None:
        Path(cell["latency"]).unlink()
    return cell


CASES: dict[str, dict[str, Row]] = {}  # model -> its rows


def rows(*studies: dict[str, Row]) -> Callable[[Callable], Callable]:
    """Return the rows that a test asks for: models of one page, since making a page takes seconds."""

    def register(test: Callable) -> Callable:
        CASES.update({f"{test.__name__}-{number}": study for number, study in enumerate(studies)})
        return test

    return register


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Open the page of all cases, by the name of its reference."""

    @cache
    def page(reference: str) -> Path:
        folder = tmp_path_factory.mktemp(reference)
        models = [model for model, formats in CASES.items() if (reference == "base") == ("base" in formats)]
        cells = [write(folder, model, name, row) for model in models for name, row in CASES[model].items()]
        return build(folder, models, cells, reference)

    return page


@pytest.fixture
def sentences(pages: Callable[[str], Path], visit: Visit, request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Return the sentences on one of the test's studies, for a budget in percent."""

    def read(budget: float = 1, number: int = 0, reference: str = "fp16") -> list[str]:
        page = visit(pages(reference))
        page.locator("#budget").fill(str(budget))
        every = page.get_by_role("button", name=re.compile("^all .* models$"))
        if every.count():
            every.click()
        model = f"{request.function.__name__}-{number}"
        if not page.locator("#verdict h3").count():
            return page.locator("#verdict li").all_inner_texts()
        return (
            page.locator("#verdict h3", has_text=model).locator("xpath=following-sibling::ul[1]/li").all_inner_texts()
        )

    return read


@rows({"fp16": Row(100), "tie": Row(200, 1.003, wobble=20), "worse": Row(150, 1.003)})
def test_a_tie_with_the_reference_is_within_every_budget(sentences: Callable) -> None:
    said = sentences(0)
    assert said[0].startswith("tie is the fastest of those within 0%: 200 tokens/s, 2 times fp16's; a tie with fp16's")
    assert re.search(r"95% interval \W\d+% to \+\d+%", said[0])
    assert not any("worse" in line or "reaches beyond" in line for line in said)


@rows({"fp16": Row(100, noise=True), "close": Row(200, 1.0001, noise=True)})
def test_a_loss_within_the_noise_floor_is_a_tie(sentences: Callable) -> None:
    assert sentences(0)[0] == (
        "close is the fastest of those within 0%: 200 tokens/s, 2 times fp16's; its loss is within the noise of the "
        "arithmetic."
    )


@rows({"fp16": Row(100), "better": Row(200, 1.01), "quicker": Row(205, 1.02)})
def test_of_equally_fast_rows_the_better_is_named(sentences: Callable) -> None:
    said = sentences(3)
    assert said[0].startswith(
        "better is among the fastest of those within 3%: 200 tokens/s, 2 times fp16's; perplexity"
    )
    assert said[1].startswith("As fast, as far as can be told: quicker (205 tokens/s; perplexity +2%")
    assert said[2] == "The table calls quicker dominated: better is as fast, as far as can be told, and loses less."
    assert said[-1] == "The Pareto front, whatever the loss: fp16, better."


@rows({"fp16": Row(100), "inside": Row(200, 1.029), "outside": Row(400, 1.031, wobble=0.5)})
def test_a_dominator_beyond_the_budget_is_explained(sentences: Callable) -> None:
    said = sentences(3)
    assert said[0].startswith(
        "inside is the fastest of those within 3%: 200 tokens/s, 2 times fp16's; perplexity +2.9%"
    )
    assert said[1] == (
        "The table calls inside dominated: outside is faster and loses no more, as far as can be told; but it is not "
        "within 3%."
    )
    assert said[-1] == "The Pareto front, whatever the loss: fp16, outside."


# top and mid overlap, mid and low overlap, top and low do not; each slower one is better
@rows({"fp16": Row(50), "low": Row(92, 1.01), "mid": Row(100, 1.02), "top": Row(109, 1.03)})
def test_a_slower_dominator_is_explained(sentences: Callable) -> None:
    said = sentences(5)
    assert said[0].startswith(
        "top is among the fastest of those within 5%: 109 tokens/s, 2.18 times fp16's; perplexity"
    )
    assert said[2:4] == [
        "The table calls top dominated: mid is as fast, as far as can be told, and loses less.",
        "The table calls mid dominated: low is as fast, as far as can be told, and loses less; but it is slower than "
        "top.",
    ]


@rows({"fp16": Row(100), "other": Row(104, 1.0, wobble=20)})
def test_equal_speeds_are_no_ratio(sentences: Callable) -> None:
    said = sentences()
    assert said[0].startswith("other is among the fastest of those within 1%: 104 tokens/s; a tie")
    assert said[1] == "As fast, as far as can be told: fp16 (100 tokens/s; the reference itself)."
    assert not any("times" in line for line in said)


def of_size(mb: float) -> dict[str, Row]:
    return {"fp16": Row(100, size=16), "fast": Row(300, 1.005, size=mb), "tiny": Row(200, 1.4, size=2)}


@rows(of_size(4), of_size(20), of_size(16))
def test_the_smallest_is_that_of_the_budget(sentences: Callable) -> None:
    assert "It is also the smallest of those within 1%, 4 MB." in sentences()
    assert "The smallest of those within 1%: fp16, 16 MB (the reference itself)." in sentences(number=1)
    assert "It is also the smallest of those within 1%, 16 MB, as small as fp16." in sentences(number=2)


@rows(
    {"fp16": Row(100, size=16), "fast": Row(300, 1.005, size=5), "untimed": Row(None, 1.004, size=4)},
    {"fp16": Row(100, size=16), "untimed": Row(None, 1.3, size=4)},
    {"fp16": Row(None, size=16), "untimed": Row(None, 1.004, size=4)},
)
def test_the_smallest_may_have_no_speed(sentences: Callable) -> None:
    said = "The smallest of those within 1%: untimed, 4 MB (perplexity +0.4%"
    (line,) = (each for each in sentences() if each.startswith(said))
    assert line.endswith("; its speed was not measured).")
    assert not any("mallest" in each for each in sentences(number=1))
    nothing, line = sentences(number=2)
    assert nothing == "No speed was measured; the table says why."
    assert line.startswith(said)


@rows({"fp16": Row(100)}, {"fp16": Row(100, loud=True)})
def test_one_format_is_no_fastest_and_makes_no_front(sentences: Callable) -> None:
    only = "fp16 is the only format that was measured: 100 tokens/s; the reference itself."
    assert sentences() == [only]
    bound = "fp16 is the only format that was measured: at least 95 tokens/s; the reference itself."
    assert sentences(number=1) == [bound, "Its speed was disturbed."]


@rows({"fp16": Row(100), "worse": Row(900, 1.05)})
def test_the_only_format_within_the_budget_is_named_so(sentences: Callable) -> None:
    assert sentences() == [
        "fp16 is the only format within 1%: 100 tokens/s; the reference itself.",
        "The Pareto front, whatever the loss: fp16, worse.",
    ]


@rows({"fp16": Row(20, loud=True), "other": Row(300, 1.005), "slow": Row(100, 1.005)})
def test_no_ratio_to_a_disturbed_reference(sentences: Callable) -> None:
    said = sentences()
    assert said[0].startswith("other is the fastest of those within 1%, as far as is known: 300 tokens/s; perplexity")
    assert "Disturbed, and perhaps faster than measured: fp16 (at least 19 tokens/s; the reference itself)." in said
    assert "The Pareto front, whatever the loss: fp16, other." in said
    assert not any("times" in line for line in said)


@rows({"fp16": Row(100), "loud": Row(900, 1.005, loud=True), "even": Row(100, 1.005, loud=True)})
def test_a_disturbed_row_that_wins_even_so_is_named(sentences: Callable) -> None:
    said = sentences()
    assert said[0].startswith(
        "loud is the fastest of those within 1%, as far as is known: at least 855 tokens/s, at least 8.14 times fp16's;"
    )
    assert said[1].startswith("Disturbed, and perhaps faster than measured: even (at least 95 tokens/s; perplexity")
    assert not any("100 tokens/s" in line for line in said)  # fp16's: it loses to the lower bound
    assert said[-1] == "The Pareto front, whatever the loss: fp16, loud. Open, since disturbed: even."


@rows({"fp16": Row(100), "near": Row(104, loud=True)})
def test_a_lower_bound_that_decides_nothing_is_as_fast(sentences: Callable) -> None:
    said = sentences()
    assert said[0] == "fp16 is among the fastest of those within 1%: 100 tokens/s; the reference itself."
    assert said[1].startswith("As fast, as far as can be told: near (at least 98.8 tokens/s; a tie")


@rows({"fp16": Row(100, loud=True), "other": Row(900, 1.005, size=5, loud=True)})
def test_all_disturbed_speeds_have_no_fastest(sentences: Callable) -> None:
    said = sentences()
    assert said[0].startswith("Measured within 1%: fp16 (at least 95 tokens/s; the reference itself), other ")
    assert said[1] == "All their speeds were disturbed, so none is called the fastest."
    assert said[2].startswith("The smallest of those within 1%: other, 5 MB")
    assert said[3] == "There is no Pareto front, since every speed was disturbed."


@rows({"fp16": Row(100, device="elsewhere"), "a": Row(100, 1.05), "b": Row(100, 1.04)})
def test_a_budget_that_none_meets_names_the_closest(sentences: Callable) -> None:
    said = sentences()
    here = said[said.index("On a processor:") + 1 :]
    assert here[0].startswith("No format is within 1% of fp16's perplexity. The closest is b: perplexity +4%")
    assert here[1] == "The Pareto front, whatever the loss: b."


@rows({"fp16": Row(100), "here": Row(300, 1.005), "there": Row(900, 1.005, device="another")})
def test_rows_of_two_devices_are_apart(sentences: Callable) -> None:
    said = sentences()
    assert said[0] == "On a processor:"
    assert said[1].startswith("here is the fastest of those within 1%: 300 tokens/s, 3 times fp16's")
    (other,) = said[said.index("On another:") + 1 :]
    assert other.startswith("there is the only format that was measured: 900 tokens/s; perplexity +0.5%")


@rows({"base": Row(100), "other": Row(200, 1.005)})
def test_a_reference_is_called_by_its_name(sentences: Callable) -> None:
    said = sentences(reference="base")
    assert said[0].startswith("other is the fastest of those within 1%: 200 tokens/s, 2 times base's; perplexity")
    assert not any("fp16" in line for line in said)


@rows({"a": Row(100), "b": Row(300), "c": Row(301), "loud": Row(900, loud=True)})
def test_without_a_reference_speeds_alone_are_judged(sentences: Callable) -> None:
    assert sentences() == [
        "loud is the fastest: at least 855 tokens/s.",
        "Nothing is known of the quality (there is no fp16 to compare with).",
    ]


@rows({"fp16": Row(100), "other": Row(200, 1.005), "unknown": Row(900, None)})
def test_a_row_without_a_quality_is_left_out(sentences: Callable) -> None:
    said = sentences()
    assert said[0].startswith("other is the fastest of those within 1%: 200 tokens/s, 2 times")
    assert "Nothing is known of the quality of unknown, so the sentences above leave it out." in said
    assert said[-1] == "The Pareto front, whatever the loss: fp16, other."


@rows({"fp16": Row(100), "edge": Row(200, 1.009)}, {"fp16": Row(100), "edge": Row(200, 1.009, wobble=0.5)})
def test_an_interval_that_reaches_beyond_the_budget_is_said(sentences: Callable) -> None:
    beyond = "Its interval reaches beyond 1%."
    assert beyond not in sentences()
    assert beyond in sentences(number=1)


UNCHECKED = {"faithful": {"unchecked": "nothing reads it"}}


@rows({"fp16": Row(100), "wreck": Row(900, 1.8), "slow": Row(10, 1.9)})
def test_a_named_row_has_its_large_loss_warned_of(sentences: Callable) -> None:
    said = sentences()
    assert "The Pareto front, whatever the loss: fp16, wreck." in said
    assert said[-1] == "Warning, wreck: a large loss: its perplexity is 1.8 times fp16's."
    assert not any("Warning, slow" in line for line in said)  # which no sentence names


LEFT_OUT = "Not checked against its own weights, so in no sentence here and on no front: other (nothing reads it)."


@rows(
    {"fp16": Row(100), "other": Row(900, 1.001, size=1, gate=UNCHECKED), "slow": Row(50, 1.002, size=5)},
    {"other": Row(900, gate=UNCHECKED)},
)
def test_an_unchecked_artifact_is_not_recommended(sentences: Callable) -> None:
    said = sentences()
    assert said[0].startswith("fp16 is the fastest of those within 1%")
    assert "The smallest of those within 1%: slow, 5 MB (perplexity +0.2%, 95% interval +0.2% to +0.2%)." in said
    assert any(line.startswith("The Pareto front, whatever the loss: fp16") and "other" not in line for line in said)
    assert said[-1] == LEFT_OUT
    assert sentences(number=1) == [LEFT_OUT]


@rows(
    {"fp16": Row(100), "looping": Row(200, 1.005, loops=4)},
    {"fp16": Row(100, loops=3), "looping": Row(200, 1.005, loops=4)},
)
def test_loops_are_warned_of_beyond_the_references(sentences: Callable) -> None:
    assert sentences()[-1] == (
        "Warning, looping: falls into a loop after 4 of 4 prompts, fp16 after 0 (95% interval of the difference +2% to "
        "+100%)."
    )
    assert not any("Warning" in line for line in sentences(number=1))
