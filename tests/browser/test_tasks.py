"""Tasks on the page: scores with flips below them, an axis of the plot, and the worst flips with their texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import HOSTILE, METRICS_VERSION, build, write_cell
from playwright.sync_api import Page

ASKED = {"names": ["quiz"], "limit": 40, "metrics": {}, "chat_template": False}


def answers(correct: list[int]) -> dict[str, Any]:
    """Return a result's task of two choices, of which the first is right."""
    texts = [
        {"prompt": f"Question {number} {HOSTILE}", "choices": ["this", "that"], "target": 0} for number in range(40)
    ]
    part = {"version": 1, "num_fewshot": 0, "output_type": "multiple_choice", "sha256": "c", "documents_sha256": "d"}
    part |= {"documents": 40, "of": 400, "ids": list(range(40)), "correct": correct, "texts": texts}
    part |= {"answers": [1 - each for each in correct], "scores": [[-1.0, -2.0]] * 40}
    figures = {
        "metric": "acc,none",
        "score": sum(correct) / 40,
        "stderr": 0.05,
        "higher_is_better": True,
        "share": True,
    }
    return figures | {"metrics": {"acc,none": [sum(correct) / 40, 0.05]}, "local": False, "tasks": {"quiz": part}}


def test_a_task_has_column_axis_and_worst_flips(tmp_path: Path, visit: Callable[..., Page]) -> None:
    cells = []
    for name, correct in (("reference", [1] * 30 + [0] * 10), ("small", [0] * 12 + [1] * 20 + [0] * 8)):
        cell = write_cell(tmp_path, "m", name, 100, 1.01 if name == "small" else 1, 10**6, [[1, 2, 3, 4]], seen=True)
        manifest = json.loads((Path(cell["artifact"]) / "quantmill.json").read_text())
        path = Path(cell["artifact"]) / "tasks.json"
        found = {"kind": "tasks", "metrics_version": METRICS_VERSION, "artifact": manifest, "engine": "fake"}
        found |= {"protocol": {"tasks": ASKED, "seed": 0}, "summary": {"tasks": 1}, "tasks": {"quiz": answers(correct)}}
        path.write_text(json.dumps(found))
        cells.append(cell | {"tasks": str(path)})
    page = visit(build(tmp_path, ["m"], cells, tasks=ASKED, seed=0))
    row = page.locator("#table tbody tr", has_text="small").inner_text()
    # 12 of 30 were lost and 2 of 10 gained: 14 flips of 40 documents, 20 right answers
    assert "50%" in row and "± 5%" in row and "35% flips" in row and "worse" in row
    page.select_option("#quality", "task_quiz_score")
    page.wait_for_function("document.querySelector('#plot').textContent.includes('quiz: right answers')")
    told = page.locator("#details details", has_text="small, quiz")
    told.locator("summary").click()
    text = told.inner_text()
    assert "40 of 400 documents" in text and "the worst flips" in text
    assert text.count('reference: "this"; asked for: "this"') + text.count('reference: "that"; asked for: "this"') == 5
    assert HOSTILE in text
