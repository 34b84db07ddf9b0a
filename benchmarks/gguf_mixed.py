#!/usr/bin/env python3
"""Compare gguf-mixed with the type of the same size, in studies that have both; print a table.

    .venv/bin/python benchmarks/gguf_mixed.py artifacts/MODEL...

Each study has scored gguf-mixed, with `gguf_mixed: { size: TYPE }`, and gguf-TYPE. The ratio of their mean divergences
has a 95% interval, by paired bootstrap over windows of the evaluation text. The last ratio is an estimate, for a
mixture that keeps TYPE's choice for tensors whose rows are not a multiple of 256, which llama-quantize makes larger.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import numpy as np

from quantmill.checkpoint import gguf_file
from quantmill.llamacpp import mixture
from quantmill.metrics import bootstrap

HEADINGS = ("model", "type", "its bits", "bits of the mixture", "KL of the type", "KL of the mixture", "ratio")
MORE = ("estimated", "tokens scored", "seconds to measure", "estimates off by", "ratio, rows of 256")
BLOCK = 256


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def held(model: Path, name: str, sensitivity: Any) -> float:
    """Estimate the loss of a mixture with gguf-NAME's types for tensors with other rows, relative to gguf-NAME."""
    stored = gguf_file.read_all(model / f"gguf-{name}/model.gguf").tensors
    options = {
        tensor: {type_: mixture.Choice(type_, entry["bytes"], entry["kld"]) for type_, entry in types.items()}
        for tensor, types in sensitivity["tensors"].items()
    }
    theirs = {tensor: types[stored[tensor].type] for tensor, types in options.items()}
    allowed = {
        tensor: list(types.values()) if stored[tensor].shape[-1] % BLOCK == 0 else [theirs[tensor]]
        for tensor, types in options.items()
    }
    ours = mixture.choose(allowed, sum(choice.nbytes for choice in theirs.values()))
    return sum(choice.kld for choice in ours.values()) / sum(choice.kld for choice in theirs.values())


def row(model: Path) -> list[str]:
    """Return the table's cells for a model's folder of artifacts."""
    mixed = read(model / "quality/gguf-mixed.json")
    name = mixed["artifact"]["parameters"]["as_large_as"]
    plain, sensitivity = read(model / f"quality/gguf-{name}.json"), read(model / "gguf-sensitivity.json")
    ours, theirs = (np.array(each["windows"]["kld"]) for each in (mixed, plain))
    drawn = bootstrap.indices(len(ours))
    low, high = bootstrap.interval(ours[drawn].sum(axis=1) / theirs[drawn].sum(axis=1), len(ours))
    return [
        model.name,
        name,
        *(f"{each['artifact']['bits_per_weight']:.3f}" for each in (plain, mixed)),
        *(f"{each['summary']['kld_mean']:.5f}" for each in (plain, mixed)),
        f"{ours.sum() / theirs.sum():.3f} ({low:.3f} to {high:.3f})",
        f"{mixed['artifact']['parameters']['estimated_kld']:.5f}",
        f"{mixed['scored_tokens']:,}",
        f"{sensitivity['seconds']:.0f}",
        f"{sensitivity['median_error']:.0%}",
        f"{held(model, name, sensitivity):.2f}",
    ]


rows = [[*HEADINGS, *MORE], ["---"] * len([*HEADINGS, *MORE]), *map(row, map(Path, sys.argv[1:]))]
print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
