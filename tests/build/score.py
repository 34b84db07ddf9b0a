"""Run in envs/llama_cpp: print an artifact's perplexity over the text up to the end of each window, as a JSON list.

python tests/build/score.py ENGINE ARTIFACT EVALUATION PROTOCOL
"""

import json
import sys
from pathlib import Path

import numpy as np

from quantmill import engines
from quantmill.gate import fidelity
from quantmill.quality import teacher_forcing

artifact, evaluation = map(Path, sys.argv[2:4])
engine = engines.load(sys.argv[1], artifact, "cpu", 1)
text = teacher_forcing.read_text(evaluation, sys.argv[4])
nll = fidelity.Predictions(engine, text).nll
ends = np.cumsum([window.last - window.first for window in text.windows])
print(json.dumps(np.exp(np.cumsum(nll)[ends - 1] / ends).tolist()))
