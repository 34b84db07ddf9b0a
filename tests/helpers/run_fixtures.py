"""Two runs of one small study, and the program that compares them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole_results import collect_results, whole_cell, window_losses

Run = dict[str, Any]


@pytest.fixture(scope="module")
def run_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a run of three rows as text, so that each test can change its own copy."""
    folder = tmp_path_factory.mktemp("run")
    cells = [
        whole_cell(folder, "reference", 100.0, window_losses(0), kld=0.0),
        whole_cell(folder, "int8", 200.0, window_losses(0.5)),
        whole_cell(folder, "random", 300.0, None, model="shape"),
    ]
    return json.dumps(collect_results(cells))


@pytest.fixture
def before(run_text: str) -> Run:
    return json.loads(run_text)


@pytest.fixture
def after(run_text: str) -> Run:
    return json.loads(run_text)


@pytest.fixture
def compare(tmp_path: Path, run_program: Callable) -> Callable:
    """Run the program on two runs."""

    def run(one: Run, other: Run, *options: str) -> Any:
        paths = [tmp_path / "before.json", tmp_path / "after.json"]
        for path, content in zip(paths, (one, other), strict=True):
            path.write_text(json.dumps(content))
        return run_program("report.compare", *paths, *options)

    return run
