"""Run in envs/torch: convert small random models of every kind of attention to CTranslate2's float32, and print how far
each is from transformers, or why it was refused, as JSON.

    python tests/build/ct2_architectures_checks.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path[:0] = [str(REPO / "scripts"), str(REPO / "tests/helpers")]

import numpy as np  # noqa: E402
import transformers  # noqa: E402
from ct2_sources import MODELS, VOCAB, source  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.build import ct2  # noqa: E402
from quantmill.checkpoint import ctranslate2_model, shards  # noqa: E402
from quantmill.common.program import UserError, first_line  # noqa: E402
from quantmill.gate import fidelity  # noqa: E402
from quantmill.metrics.windows import Window  # noqa: E402
from quantmill.quality import teacher_forcing  # noqa: E402

TOKENS = 200


def distance(folder: Path, text: teacher_forcing.Text) -> dict[str, Any]:
    """Return the gate's findings about the converted model."""
    expected = fidelity.Predictions(engines.load("transformers", folder, "cpu", 1), text)
    words = expected.as_json() | {"against": "the source's weights", "compared_perplexity": expected.perplexity}
    words |= {"compute_type": "float32"}
    try:
        ct2.Converter(str(folder)).convert(str(folder / "ct2"), quantization="float32", force=True)
    except Exception as error:  # as build.ct2 catches it
        return {"refused": first_line(error)}
    try:
        ctranslate2_model.check(folder / "ct2", shards.find(folder).config())
        engine = engines.load("ctranslate2", folder / "ct2", "cpu", 1)
        return fidelity.check(words, fidelity.Predictions(engine, text, words), text, engine.compute_type)
    except UserError as error:
        return {"refused": str(error)}


transformers.logging.set_verbosity_error()
ids = np.random.default_rng(0).integers(2, VOCAB, TOKENS).tolist()
text = teacher_forcing.Text(ids, [Window(0, TOKENS, 1, TOKENS)], [TOKENS - 1.0], {})
work = Path(sys.argv[1])
facts = {name: distance(source(work / name.replace(" ", "-"), *MODELS[name]), text) for name in MODELS}
print(json.dumps(facts))
