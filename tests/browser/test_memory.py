"""Memory in use on the page: the column, the axis of the plot, and the budget in the verdict."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import build, column, write_cell
from playwright.sync_api import Page

Visit = Callable[..., Page]
ASKED = {"context": 1000, "users": 4, "budget_gb": 24.0}
# a row's tokens/s, perplexity over the reference's, weights in bytes, and bytes of a token; None: not told
ROWS: dict[str, tuple[int, float, int, int | None]] = {
    "fp16": (100, 1, 20 * 10**9, 2 * 10**6),  # 28 GB with 4,000 tokens
    "quick": (300, 1.005, 10 * 10**9, 2 * 10**6),  # 18 GB
    "small": (200, 1.008, 4 * 10**9, 10**6),  # 8 GB
    "secret": (900, 1.001, 0, None),
}


def write(folder: Path, name: str) -> dict[str, Any]:
    rate, ratio, weights, of_token = ROWS[name]
    cell = write_cell(folder, "only", name, rate, ratio, 10**6, [[1, 2, 3, 4]], seen=False)
    path = Path(cell["latency"])
    cache = {"layers": [{"count": 2, "token_bytes": (of_token or 0) / 2, "window": None, "state_bytes": 0}]}
    said = None if of_token is None else {"weight_bytes": weights, "cache": cache}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"footprint": said}))
    return cell


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    return build(folder, ["only"], [write(folder, name) for name in ROWS], "fp16", memory_at=ASKED)


def sentences(page: Page, budget: str) -> list[str]:
    page.locator("#memory-budget").fill(budget)
    return page.locator("#verdict li").all_inner_texts()


def test_the_verdict_names_what_fits(study: Path, visit: Visit) -> None:
    page = visit(study)
    assert page.locator("#memory-budget").input_value() == "24"
    said = page.locator("#verdict li").all_inner_texts()
    assert said[0].startswith("quick is the fastest of those within 1% and 24 GB: 300 tokens/s, 3 times fp16's; ")
    assert said[1] == (
        "quick fits 24 GB with 1,000 tokens and 4 users: it takes 18 GB (10 GB of weights, 8 GB of keys and values)."
    )
    assert "More than 24 GB with 1,000 tokens and 4 users: fp16 (28 GB)." in said
    assert said[-1] == (
        "Whether it fits 24 GB is not known: secret (its engine does not report what its weights and its cache take)."
    )


def test_the_reader_sets_another_budget(study: Path, visit: Visit) -> None:
    page = visit(study)
    said = sentences(page, "8")
    assert said[0].startswith("small is the only format that was measured and fits 8 GB: 200 tokens/s")
    assert said[1].startswith("small fits 8 GB with 1,000 tokens and 4 users: it takes 8 GB (4 GB of weights, 4 GB ")
    assert said[2] == (
        "The table calls small dominated: quick is faster and loses no more, as far as can be told; but it is not "
        "known to fit 8 GB."
    )
    assert not any("Pareto front" in line for line in said)
    assert sentences(page, "7.9") == [
        "Nothing is known to fit 7.9 GB with 1,000 tokens and 4 users.",
        "More than 7.9 GB with 1,000 tokens and 4 users: fp16 (28 GB), quick (18 GB), small (8 GB).",
        "Whether it fits 7.9 GB is not known: secret (its engine does not report what its weights and its cache take).",
    ]
    without = sentences(page, "")
    assert without[0].startswith("secret is the fastest of those within 1%: 900 tokens/s")
    assert not any("GB" in line and "smallest" not in line for line in without)


def test_the_table_and_the_plot_have_it(study: Path, visit: Visit) -> None:
    page = visit(study)
    assert column(page, "memory_at_bytes") == ["28 GB", "18 GB", "8 GB", "\u2013"]
    title = page.locator("#sort-memory_at_bytes").inner_text()
    assert title == "memory, 4 x 1,000 tokens"
    page.locator("#cost").select_option("memory_at_bytes")
    page.wait_for_function("document.querySelectorAll('#plot .mark-symbol path').length >= 3")
    note = page.locator("#plot-note").inner_text()
    assert "Memory: weights and cache of 1,000 tokens and 4 users." in note
    assert "Not drawn, for lack of one of the two figures: 1 of 4 rows." in note


def test_a_study_that_does_not_ask_has_none_of_it(tmp_path: Path, visit: Visit) -> None:
    page = visit(build(tmp_path, ["only"], [write(tmp_path, "fp16")], "fp16"))
    assert page.locator("#memory-controls").is_hidden()
    assert page.locator("#sort-memory_at_bytes").count() == 0
    assert page.locator("#cost option[value=memory_at_bytes]").count() == 0
