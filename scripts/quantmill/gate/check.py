"""Refuse an artifact whose engine does not calculate what its weights say, or whose predictions are garbage.

    python scripts/quantmill gate.check ARTIFACT OUT --engine ctranslate2 --evaluation evaluation.json
        --reference source.json [--expected artifact.json] [--factor 100]

Programs that build artifacts run it in a process of its own before the artifact gets its name, because conversions go
wrong silently. source.json is what gate.expected wrote for the model's source, and artifact.json the same for the
artifact's weights; without it the engine is compared with the source's. A large loss alone is not refused: the report
shows it. OUT is a small JSON file of the findings.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from quantmill import devices, engines
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, parser
from quantmill.gate import fidelity
from quantmill.quality import alignment, teacher_forcing

NOTHING = 0.5  # of the vocabulary's size; a larger perplexity is near chance
WORSE = 1.5  # times the reference's, which may itself be near chance


def read(path: Path, protocol: str) -> dict[str, Any]:
    """Read what gate.expected wrote. Raises `UserError` if that was by another protocol."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("protocol") != protocol or not ("places" in content or "unread" in content):
        raise UserError(f"{path}: was made by {content.get('protocol')}, not by {protocol}, or is old; delete it")
    return content


def check_sanity(perplexity: float, reference: dict[str, Any], factor: float) -> None:
    """Raise `UserError` for a perplexity of garbage: beyond `factor` times the reference's, or near chance."""
    theirs, vocab = reference["perplexity"], reference["probes"]["vocab"]
    first = f"its perplexity is {perplexity:.4g} on the first {reference['windows']} windows"
    if not perplexity <= factor * theirs:  # also true of NaN
        raise UserError(
            f"{first}, more than {factor:g} times the reference's {theirs:.4g}; raise max_perplexity_ratio to keep it"
        )
    if perplexity > NOTHING * vocab and perplexity > WORSE * theirs:
        raise UserError(f"{first}, near that of guessing among {vocab} tokens (the reference's is {theirs:.4g})")


def main() -> None:
    arguments = parser(__doc__)
    teacher_forcing.add_arguments(arguments)
    arguments.add_argument("--reference", type=Path, required=True, help="what gate.expected wrote for the source")
    arguments.add_argument("--expected", type=Path, help="the same for the artifact's weights; default: the source's")
    arguments.add_argument("--unchecked", help="why the engine is compared with nothing")
    arguments.add_argument("--factor", type=float, default=100, help="of the reference's perplexity, at most")
    options = arguments.parse_args()

    device = devices.resolve(options.device, gpus=options.gpus)
    reference = read(options.reference, options.protocol)
    expected = read(options.expected, options.protocol) if options.expected else reference
    reason = options.unchecked or expected.get("unread")
    text = teacher_forcing.read_text(options.evaluation, options.protocol).first(reference["windows"])
    os.environ[engines.EXACT] = "1"  # before its module is imported
    engine = engines.load(
        options.engine, options.artifact, device, options.threads, options.gpus, options.stream, **options.options
    )
    engine.read_ahead([*text.inputs(), *alignment.texts(options.artifact, text.ids, options.reference)])
    alignment.examine(engine, options.artifact, text.ids, options.reference)
    perplexity: float | None = None
    if "logits" in engine.capabilities:
        found = fidelity.Predictions(engine, text, None if reason else expected)
        perplexity = found.perplexity
        faithful = {"unchecked": reason} if reason else fidelity.check(expected, found, text, engine.compute_type)
    else:
        faithful = {"unchecked": reason or teacher_forcing.NO_LOGITS}
        if "target_logprobs" in engine.capabilities:
            told = [found.logprobs for _, found, _ in teacher_forcing.targets(engine, text)]
            perplexity = float(np.exp(-np.concatenate(told).astype(np.float64).mean()))
    if perplexity is not None:
        check_sanity(perplexity, reference, options.factor)
    facts = {"perplexity": perplexity, "reference": reference["perplexity"], "windows": reference["windows"]}
    write_json(options.out, facts | {"protocol": options.protocol, "factor": options.factor, "faithful": faithful})
