"""Servers under load on the page: users that they serve, plots, the table, refused figures."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import METRICS_VERSION, build, side_by_side, write_cell
from playwright.sync_api import Page, expect

SERVING = {"limits": {"ttft_ms": 500.0, "tpot_ms": 20.0}}
# users -> tokens/s of all, TTFT and TPOT in ms, for 90% of the requests
QUICK = {1: (100, 20, 10), 8: (640, 100, 12), 32: (1280, 400, 25)}
SLOW = {1: (50, 20, 20), 8: (200, 700, 40)}
SHORT = "3 of 8 answers have fewer tokens than were asked for: 7 of 8 in one of them"


def load(users: int, total: float, ttft: float, tpot: float, *, refused: str | None = None) -> dict[str, Any]:
    figures: dict[str, float | None] = {"requests": 100, "output_tokens_per_second": total, "makespan_s": 10.0}
    figures |= {"output_tokens_per_second_low": 0.9 * total, "output_tokens_per_second_high": 1.1 * total}
    figures |= {f"ttft_ms_p{percent}": ttft * percent / 90 for percent in (50, 90)}
    figures |= {f"tpot_ms_p{percent}": tpot * percent / 90 for percent in (50, 90)} | {"slo_attainment": 0.5}
    finding = {"fault": "short", "message": refused, "refuses": True}
    return {
        "load": f"concurrency-{users}",
        "slots": users,
        "rate": None,
        "figures": figures,
        "missing": {},
        "findings": [finding] if refused else [],
        "interference": [],
        "quantiles": {"ttft_ms": [ttft] * 13, "itl_ms": [0.0, *[tpot] * 12]},
    }


def serve(cell: dict[str, Any], run: str, loads: list[dict[str, Any]], rate: float | None = None) -> dict[str, Any]:
    """Return the cell as a server with a result of its own."""
    path = Path(cell["artifact"]) / f"{run}.json"
    artifact = json.loads((Path(cell["artifact"]) / "quantmill.json").read_text())
    trials = [{"rate": 1.0, "met": 40, "arrived": 40, "low": 0.9, "high": 1.0}]
    found = {
        "rate": rate,
        "above": 2.0,
        "proven": None,
        "refuted": 4.0,
        "trials": trials,
        "findings": [],
        "interference": [],
    }
    content = {"kind": "loads", "metrics_version": METRICS_VERSION, "artifact": artifact, "engine": cell["engine"]}
    content |= {"protocol": {"loads": SERVING}, "gpus": 1, "device": {"name": "a card"}, "loads": loads}
    content |= {"summary": {"startup_s": [3.0]}, "goodput": found if rate else None, "versions": {}}
    path.write_text(json.dumps(content))
    logs = cell["logs"] | {"loads": cell["logs"]["latency"]}
    return cell | {"run": run, "loads": str(path), "logs": logs}


@pytest.fixture
def page(tmp_path: Path, visit: Callable[..., Page]) -> Page:
    names = ("reference", "quick", "slow", "broken")
    cells = [write_cell(tmp_path, "m", name, 100, 1, 10**6, [[1, 2, 3, 4]] * 2, seen=False) for name in names]
    cells[1] = serve(cells[1], "server", [load(users, *each) for users, each in QUICK.items()], rate=1.5)
    cells[2] = serve(cells[2], "server", [load(users, *each) for users, each in SLOW.items()])
    cells[3] = serve(cells[3], "server", [load(8, 900, 10, 1, refused=SHORT)])
    return visit(build(tmp_path, ["m"], cells, loads=SERVING))


def sentences(page: Page) -> list[str]:
    return page.locator("#servers li").all_inner_texts()


def test_who_serves_so_many_users(page: Page) -> None:
    page.fill("#users", "8")
    best, slow, broken = sentences(page)
    assert best == (
        "8 users are served best within these limits by quick@server (concurrency-8): 640 tokens/s together, "
        "TTFT 100 ms, TPOT 12 ms for 90% of the requests."
    )
    assert slow.startswith("slow@server (concurrency-8)")
    assert slow.endswith("for 90% of the requests: beyond the limit of TTFT and TPOT.")
    assert broken == f"broken@server: not known (refused: {SHORT})."
    page.fill("#users", "1")
    assert sentences(page)[1].startswith("So does slow@server (concurrency-1): 50 tokens/s together")
    page.fill("#limit-tpot", "15")
    assert sentences(page)[1].endswith("beyond the limit of TPOT.")
    page.fill("#users", "20")
    assert sentences(page)[0] == "No server keeps 20 users within these limits, as far as it was measured."
    assert "slow@server: not known (no load of 20 users or more)." in sentences(page)


def test_a_disturbed_load_counts_if_it_keeps_the_limits(tmp_path: Path, visit: Callable) -> None:
    """Another load of the server with more users counts where it keeps the limits: then fewer users are served too."""
    cells = [
        write_cell(tmp_path, "m", name, 9, 1, 10**6, [[1]], seen=False) for name in ("reference", "a", "b", "c", "d")
    ]
    loud, unsteady = load(8, 900, 20, 10), load(8, 800, 20, 10)
    loud["interference"] = ["a neighbour"]
    unsteady["findings"] = [{"fault": "steady", "message": "the load is not steady: TTFT grows", "refuses": False}]
    served = [[loud], [unsteady], [load(8, 200, 20, 10)], [loud, load(32, 100, 20, 10)]]
    served = [serve(cell, "server", loads) for cell, loads in zip(cells[1:], served, strict=True)]
    page = visit(build(tmp_path, ["m"], [cells[0], *served], loads=SERVING))
    page.fill("#users", "8")
    best, second, third, *others = sentences(page)
    assert best.startswith(
        "8 users are served best within these limits by a@server (concurrency-8): at least 900 tokens/s together, "
        "at most TTFT 20 ms"
    )
    assert second.startswith("So does d@server (concurrency-8)")
    assert third.startswith("So does c@server (concurrency-8)")
    assert others == ["b@server: not known (concurrency-8: the load is not steady: TTFT grows)."]
    page.fill("#limit-tpot", "5")
    for server in ("a", "d"):
        assert f"{server}@server: not known (concurrency-8 was disturbed: a neighbour)." in sentences(page)


def test_the_verdict_says_who_keeps_most_users(page: Page) -> None:
    said = page.locator("#verdict li").last
    expect(said).to_have_text(
        "Most users within TTFT 500 ms and TPOT 20 ms, of those within 1%: quick@server, 8 at once, "
        "640 tokens/s together."
    )


def test_the_verdict_leaves_out_unsteady_loads_and_large_losses(tmp_path: Path, visit: Callable) -> None:
    cells = [
        write_cell(tmp_path, "m", *each, 10**6, [[1]], seen=False) for each in (("reference", 9, 1), ("q", 9, 1.05))
    ]
    unsteady = load(8, 200, 20, 10)
    unsteady["findings"] = [{"fault": "steady", "message": "the load is not steady: TTFT grows", "refuses": False}]
    cells[1] = serve(cells[1], "server", [load(1, 100, 20, 10), unsteady])
    page = visit(build(tmp_path, ["m"], cells, loads=SERVING))
    said = page.locator("#verdict li").last
    limits = "TTFT 500 ms and TPOT 20 ms, of those within"
    expect(said).to_have_text(f"No server keeps a user within {limits} 1%, as far as it was measured.")
    page.fill("#budget", "6")
    expect(said).to_have_text(f"Most users within {limits} 6%: q@server, 1 at once, 100 tokens/s together.")


def quality_that_is_not_told(folder: Path, cell: dict[str, Any]) -> Path:
    """Return the result of a server of this artifact that reports no probabilities."""
    result = json.loads(Path(cell["quality"]).read_text())
    path = folder / "nothing.json"
    path.write_text(json.dumps(result | {"summary": None, "windows": None, "reason": "tells none"}))
    return path


def test_the_verdict_takes_a_servers_loss_from_its_artifact(tmp_path: Path, visit: Callable) -> None:
    """Of a server that tells no probabilities, as llama-server. One whose artifact has no quality either is named so;
    a disturbed load beyond the limits counts for none."""
    names = (("reference", 9, 1), ("poor", 9, 1.08), ("good", 9, 1.001), ("bare", 9, 1))
    cells = [write_cell(tmp_path, "m", *each, 10**6, [[1]], seen=False) for each in names]
    told_nothing = quality_that_is_not_told(tmp_path, cells[1])
    cells[3]["quality"] = str(told_nothing)
    served = [[load(32, 900, 20, 10)], [load(1, 100, 20, 10), load(8, 200, 900, 10)], [load(4, 150, 20, 10)]]
    served[1][1]["interference"] = ["other programs took 40% of the processors"]
    cells += [
        serve(cell, "server", loads) | {"quality": str(told_nothing)}
        for cell, loads in zip(cells[1:], served, strict=True)
    ]
    page = visit(build(tmp_path, ["m"], cells, loads=SERVING))
    said = page.locator("#verdict li").last
    limits = "TTFT 500 ms and TPOT 20 ms, of those within"
    expect(said).to_have_text(
        f"Most users within {limits} 1%: bare@server, 4 at once, 150 tokens/s together; its quality was not measured."
    )
    page.fill("#budget", "9")
    expect(said).to_have_text(f"Most users within {limits} 9%: poor@server, 32 at once, 900 tokens/s together.")


def test_of_two_runs_a_server_has_its_artifacts_loss(tmp_path: Path, visit: Callable) -> None:
    cells = [
        write_cell(tmp_path, "m", *each, 10**6, [[1]], seen=False) for each in (("reference", 9, 1), ("poor", 9, 1.08))
    ]
    told_nothing = quality_that_is_not_told(tmp_path, cells[1])
    cells.append(serve(cells[1], "server", [load(8, 900, 20, 10)]) | {"quality": str(told_nothing)})
    run = build(tmp_path, ["m"], cells, loads=SERVING)
    page = visit(side_by_side(run, run, tmp_path / "both.html"))
    said = page.locator("#verdict li").last
    limits = "TTFT 500 ms and TPOT 20 ms, of those within"
    expect(said).to_have_text(f"No server keeps a user within {limits} 1%, as far as it was measured.")
    page.fill("#budget", "9")
    expect(said).to_have_text(f"Most users within {limits} 9%: poor@server, before, 8 at once, 900 tokens/s together.")


def test_two_runs_share_the_limits_of_loads(tmp_path: Path, visit: Callable) -> None:
    """If neither has any, every load is within them."""
    cell = write_cell(tmp_path, "m", "reference", 9, 1, 10**6, [[1]], seen=False)
    bare = build(tmp_path / "bare", ["m"], [cell])
    served = build(tmp_path / "served", ["m"], [serve(cell, "server", [load(8, 900, 20, 10)])], loads=SERVING)
    page = visit(side_by_side(bare, served, tmp_path / "both.html"))
    assert [page.input_value(f"#limit-{name}") for name in ("ttft", "tpot")] == ["500", "20"]
    results = served.with_name("results.json")
    content = json.loads(results.read_text())
    del content["config"]["loads"]
    results.write_text(json.dumps(content))
    page = visit(side_by_side(bare, served, tmp_path / "neither.html"))
    assert [page.input_value(f"#limit-{name}") for name in ("ttft", "tpot")] == ["", ""]
    page.fill("#users", "8")
    (said,) = sentences(page)
    assert said.startswith("8 users are served best within these limits by reference@server, after")


def test_limits_begin_as_the_config_has_them(page: Page) -> None:
    values = [page.input_value(f"#{name}") for name in ("users", "limit-ttft", "limit-tpot")]
    assert values == ["32", "500", "20"]


def test_the_table_holds_every_load(page: Page) -> None:
    rows = page.locator("#load-table tbody tr")
    expect(rows).to_have_count(len(QUICK) + 1 + len(SLOW) + 1)
    first = rows.first.inner_text()
    assert "concurrency-1" in first
    assert re.search(r"100\s+90 to 110", first)
    last = rows.last
    last.get_by_role("button", name=re.compile("^refused: why")).first.click()
    expect(page.locator("#explanation")).to_have_text(f"refused: {SHORT}")


def test_plots_are_drawn_of_what_counts(page: Page) -> None:
    captions = page.locator("#load-plots figcaption").all_inner_texts()
    assert [text.split(" ?")[0].strip() for text in captions] == [
        "What all users get, over what one of them sees",
        "Who keeps the limits as requests arrive faster",
        "How long a user waits for the first token",
        "How long the pauses between tokens are",
    ]
    throughput = page.locator("#load-plots figure").first
    assert throughput.locator("g.mark-symbol.layer_2_marks path, g.mark-symbol path").count() >= len(QUICK) + len(SLOW)
    assert "broken@server" not in throughput.inner_text()


def test_plots_of_one_model_hold_no_other_models_servers(tmp_path: Path, visit: Callable[..., Page]) -> None:
    """Both have a server of the same name."""
    cells = []
    for model, ttft in (("m", 20), ("n", 70)):
        cell = write_cell(tmp_path, model, "reference", 100, 1, 10**6, [[1, 2, 3, 4]] * 2, seen=False)
        cells.append(serve(cell, "server", [load(users, 100, ttft, 10) for users in (1, 8)], rate=1.5))
    page = visit(build(tmp_path, ["m", "n"], cells, loads=SERVING))
    for model, ttft in (("m", 20), ("n", 70)):
        page.select_option("#load-model", model)
        page.evaluate("given = []; drawAll = draw; draw = (target, name, plot, rows) => given.push(rows); null")
        page.evaluate("showLoadPlots()")
        found = page.evaluate("given")
        page.evaluate("draw = drawAll; null")
        assert len(found) == 4
        assert {row["model"] for rows in found for row in rows} == {model}
        assert {row["ms"] for row in found[2]} == {ttft}


def test_a_study_without_servers_has_no_such_section(tmp_path: Path, visit: Callable[..., Page]) -> None:
    cell = write_cell(tmp_path, "m", "reference", 100, 1, 10**6, [[1, 2, 3, 4]] * 2, seen=False)
    assert not visit(build(tmp_path, ["m"], [cell])).locator("#loads-section").is_visible()
