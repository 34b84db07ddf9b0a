#!/usr/bin/env python3
"""Refuse an artifact that lost too much: score the beginning of the evaluation text and compare with the reference.

    python scripts/gate.py ARTIFACT OUT --engine ctranslate2 --evaluation evaluation.json
        [--reference gate.json] [--factor 1.5]

The programs that build artifacts run it, in a process of its own, before they publish: conversions go wrong in silence.
OUT is a small JSON file, the perplexity of the first windows; that of the reference is what others are compared with.
"""

import json
from pathlib import Path

import numpy as np

import devices
import engines
from common import alignment, scoring
from common.program import UserError, parser, run
from common.publish import publish_json
from devices import cpu
from metrics import perplexity

WINDOWS = 8  # a broken artifact is broken everywhere
ROWS = 16  # positions whose float64 log-probabilities exist at a time


def main() -> None:
    arguments = parser(__doc__)
    scoring.add_arguments(arguments)
    arguments.add_argument("--reference", type=Path, help="what this program wrote for the reference")
    arguments.add_argument("--factor", type=float, default=1.5, help="of the reference's perplexity, at most")
    options = arguments.parse_args()

    device = devices.resolve(options.device)
    text = scoring.read_text(options.evaluation, options.protocol).first(WINDOWS)
    engine = engines.load(options.engine, options.artifact, device, min(options.threads, cpu.available_threads()))
    answers = alignment.examine(engine, options.artifact, text.ids, options.reference)
    total = 0.0
    for chunk in scoring.chunks(engine, text):
        for low in range(0, len(chunk.targets), ROWS):
            scores = perplexity.log_softmax(scoring.on_host(chunk.logits[low : low + ROWS]))
            total += float(perplexity.nll(scores, chunk.targets[low : low + ROWS]).sum())
        del chunk  # or it would still be held while the engine makes the next one
    found = {"perplexity": float(np.exp(total / text.positions)), "windows": len(text.windows)}
    found |= {"protocol": options.protocol}
    if options.reference:
        reference = json.loads(options.reference.read_text(encoding="utf-8"))
        if (scored_by := reference.get("protocol")) != options.protocol:
            raise UserError(f"{options.reference}: was scored by {scored_by}, not by {options.protocol}; delete it")
        theirs = reference["perplexity"]
        if not found["perplexity"] <= options.factor * theirs:  # NaN is not either
            raise UserError(
                f"its perplexity is {found['perplexity']:.4g} on the first {len(text.windows)} windows, more than "
                f"{options.factor:g} times the reference's {theirs:.4g}; it is broken, or quality_gate is too strict"
            )
        found |= {"reference": theirs, "factor": options.factor}
    publish_json(options.out, found | answers)


if __name__ == "__main__":
    run(main)
