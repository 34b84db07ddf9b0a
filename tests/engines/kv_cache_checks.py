"""Run in envs/llama_cpp: mean divergence from a key-value cache of float32, by position, as JSON.

python tests/engines/kv_cache_checks.py ARTIFACT EVALUATION
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from quantmill import engines
from quantmill.metrics.perplexity import log_softmax

LENGTH = 512  # the demo's context
ids = json.loads(Path(sys.argv[2]).read_text())["ids"][:LENGTH]


def score(kind: str, **options: Any) -> np.ndarray:
    """Log-probabilities [LENGTH, vocabulary] with a cache of a type."""
    engine = engines.load("llama_cpp", Path(sys.argv[1]), "cpu", 1, type_k=kind, type_v=kind, **options)
    found = np.concatenate([log_softmax(chunk) for chunk in engine.logits(ids)])
    engine.close()
    return found


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (np.exp(p) * (p - q)).sum(axis=1)


reference = score("f32")
pieces = {"f32": score("f32", n_batch=32), "q4_0": score("q4_0", n_batch=32)}
whole = {kind: score(kind) for kind in ("f16", "q8_0", "q4_0")}
halves = {kind: divergence(reference, found).reshape(2, -1).mean(axis=1).tolist() for kind, found in whole.items()}
print(
    json.dumps(
        {
            "halves": halves,
            "pieces_f32": float(divergence(reference, pieces["f32"]).mean()),
            "pieces_q4_0": float(divergence(whole["q4_0"], pieces["q4_0"]).mean()),
        }
    )
)
