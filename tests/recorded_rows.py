"""The rows of results/, and the shapes of their models."""

import json
from typing import Any

from conftest import REPO

from planning import shape
from planning.rates import recorded

KNOWN = {  # parameters as transformers counts them
    "config/examples/llama-2-7b.json": 6_738_415_616,
    "config/examples/llama-1.1b.json": 1_100_048_384,
    "demo/config.json": 5_869_312,
}
ROWS = recorded([REPO / "results/demo/results.json", REPO / "results/h200/results.json"])


def of_row(row: dict[str, Any]) -> shape.Shape:
    """The shape of a recorded row's model, by its number of parameters."""
    file = next(file for file, count in KNOWN.items() if count == row["artifact"]["parameter_count"])
    return shape.of(json.loads((REPO / file).read_text()))
