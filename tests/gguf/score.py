"""Run in envs/llama_cpp: print an artifact's perplexity.

python tests/gguf/score.py ENGINE ARTIFACT EVALUATION PROTOCOL
"""

import sys
from pathlib import Path

import engines
from scoring import fidelity, teacher_forcing

artifact, evaluation = map(Path, sys.argv[2:4])
engine = engines.load(sys.argv[1], artifact, "cpu", 1)
print(fidelity.Predictions(engine, teacher_forcing.read_text(evaluation, sys.argv[4])).perplexity)
