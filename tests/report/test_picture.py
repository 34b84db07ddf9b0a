"""The pictures: which rows they name and join, and where their labels go."""

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import REPO

from quantmill.report import axes
from quantmill.report.label_placement import Box, LabelPosition, hidden, places

SIZE = (820.0, 520.0)
POINT = 6.0  # pixels from a point's middle to its rim
PAIR = ("perplexity_loss", "bits_per_weight")


def rows(run: str) -> list[dict[str, Any]]:
    """Return the rows of recorded results, as plots take them."""
    return axes.points(json.loads((REPO / run / "results.json").read_text())["rows"])


def row(format: str, size: float | None, loss: float | None, model: str = "m", **more: Any) -> dict[str, Any]:
    return {"format": format, "model": model, "bits_per_weight": size, "perplexity_loss": loss, **more}


def texts(picture: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("}text")]


def around(point: tuple[float, float]) -> Box:
    x, y = point
    return x - POINT, y - POINT, x + POINT, y + POINT


def test_the_size_front_spans_devices() -> None:
    content = [
        row("reference", 16, 0),
        row("dominated", 9, 0.2, device="a"),
        row("small", 8, 0.1, device="b"),
        row("same", 8, 0.1),
        row("larger, as good", 8.5, 0.1),
        row("no quality", 4, None),
        row("no size", None, 0.01),
        row("smallest", 5, 0.5),
        row("of another model", 9, 0.9, model="other"),
    ]
    joined = [each["format"] for each, front in zip(content, axes.smallest(content, *PAIR), strict=True) if front]
    assert joined == ["reference", "small", "smallest", "of another model"]
    unchecked = [each | {"unchecked": each["format"] == "smallest"} for each in content]
    assert [each["format"] for each, front in zip(content, axes.smallest(unchecked, *PAIR), strict=True) if front] == [
        "reference",
        "small",
        "of another model",
    ]
    answers = [row("worse", 4, None, task_quiz_score=0.5), row("better", 4, None, task_quiz_score=0.6)]
    assert axes.smallest(answers, "task_quiz_score", PAIR[1]) == [False, True]


def test_the_loss_is_the_ratio_less_one() -> None:
    found = {each["cell"]: each for each in rows("results/smollm2-h200")}
    assert [found["fp16"][name] for name in axes.LOSS] == [0, 0, 0]
    loss, low, high = (found["gguf-q4_k_m"][name] for name in axes.LOSS)
    assert (loss, low, high) == pytest.approx((0.0315, 0.0299, 0.0331), abs=1e-4)
    assert [rows("results/smollm2-tasks")[0][name] for name in axes.LOSS] == [None] * 3


@pytest.mark.parametrize(
    "points",
    [
        [(400.0, 260.0)],
        [(4.0, 4.0), (816.0, 516.0), (4.0, 516.0), (816.0, 4.0)],  # corners
        [(400.0 + i, 260.0 + i % 3) for i in range(0, 24, 3)],  # one heap
        [(100.0 + 9 * i, 400.0 - 9 * i) for i in range(23)],  # a front
    ],
    ids=["one", "corners", "heap", "front"],
)
def test_labels_hide_nothing_and_stay_within(points: list[tuple[float, float]]) -> None:
    names = [f"gguf-iq{i}_xs" for i in range(len(points))]
    found = places(points, names, [around(point) for point in points], SIZE)
    boxes = [place.box(name) for place, name in zip(found, names, strict=True)]
    for left, top, right, bottom in boxes:
        assert left >= 0 and top >= 0 and right <= SIZE[0] and bottom <= SIZE[1]
    assert hidden(boxes, [around(point) for point in points]) == 0
    assert all(hidden([one], [other]) == 0 for one, other in itertools.combinations(boxes, 2))
    for (x, y), (left, top, right, bottom), place in zip(points, boxes, found, strict=True):
        away = max(left - x, x - right, top - y, y - bottom)
        assert away < 10 or place.line  # what is further away has a line to its point


def test_a_label_without_neighbours_is_right_of_its_point() -> None:
    (place,) = places([(400, 260)], ["fp16"], [around((400, 260))], SIZE)
    assert place == LabelPosition(408, 260, "left", None)


@pytest.mark.parametrize("run", ["results/demo", "results/h200", "results/smollm2", "results/smollm2-h100"])
def test_recorded_pictures_of_speeds_name_every_row(run: str) -> None:
    said = texts((REPO / run / "quality-speed.svg").read_text())
    drawn = [each for each in rows(run) if None not in (each["perplexity"], each["tokens_per_second"])]
    assert len({each["model"] for each in drawn}) == 1 < len(drawn)
    assert [text for text in said if text in {each["cell"] for each in drawn}] == [each["cell"] for each in drawn]
    assert {each["engine"] for each in drawn} < set(said) and "perplexity (less is better)" in said


DRAWN = ["results/smollm2", "results/smollm2-h200"]


@pytest.fixture(scope="module")
def studies_page(tmp_path_factory: pytest.TempPathFactory, tools_python: Path) -> Path:
    """Let report.collect draw those pictures, in one process, without the page's plots."""
    folder = tmp_path_factory.mktemp("studies_page")
    code = "from quantmill.report import plot; plot.specifications = plot.detail_specifications = lambda rows: {}"
    commands = json.dumps([[run, "--out", str(folder / run)] for run in DRAWN])
    program = f"{code}\nimport runpy; runpy.run_path('tests/helpers/in_one_process.py', run_name='__main__')"
    command = [tools_python, "-P", "-c", program, "report.collect"]
    environment = os.environ | {"PYTHONPATH": str(REPO / "scripts")}
    made = subprocess.run(command, input=commands, cwd=REPO, env=environment, capture_output=True, text=True)
    assert made.returncode == 0 and made.stdout.count('"end": null') == len(DRAWN), made.stdout + made.stderr
    return folder


@pytest.mark.parametrize("run", DRAWN)
def test_recorded_pictures_are_what_the_report_draws(run: str, studies_page: Path) -> None:
    speeds, said = (texts((REPO / run / name).read_text()) for name in ("quality-speed.svg", "quality-size.svg"))
    assert speeds == texts((studies_page / run / "quality-speed.svg").read_text())
    assert said == texts((studies_page / run / "quality-size.svg").read_text())
    scored = [each["cell"] for each in rows(run) if None not in (each[PAIR[0]], each[PAIR[1]])]
    assert set(scored) == {cell for each in rows(run) if "@" not in (cell := each["cell"])}  # a run may be timed alone
    assert [text for text in said if text in scored] == scored
    assert {"perplexity above the reference's (less is better)", "size, bits per weight (less is better)"} <= set(said)
    assert {"0%", "0.1%", "1%", "10%", "30%", "16", "5"} <= set(said)
