"""A study that removes what only leads to its artifacts and figures."""

import csv
from collections.abc import Callable
from pathlib import Path

from workflows import ONE_FORMAT, SNAKEMAKE, jobs, study

CLEAN = ONE_FORMAT.replace("[fp16]", "[fp16, ct2-float16]") + "clean: true\n"


def test_what_leads_to_results_goes_and_results_stay(checkout: Callable[[], Path], call: Callable) -> None:
    root = checkout()
    result = call(SNAKEMAKE, *study(root, CLEAN), cwd=root)
    assert result.returncode == 0, result.stderr
    folder = root / "artifacts/demo"
    kept = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert kept == {"fp16", "ct2-float16", "tokens", "latency", "quality", "gate.json"}
    assert not list(folder.rglob("*-logits.npy"))
    with (root / "artifacts/report/results.csv").open() as file:
        assert all(float(row["perplexity"]) > 1 for row in csv.DictReader(file))
    options = study(root, CLEAN)[3:]
    assert jobs(call, root, *options) == set()
