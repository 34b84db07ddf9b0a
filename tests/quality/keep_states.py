"""Run quality.measure on the reference, whose states are kept however small its logits are.

envs/torch/bin/python tests/quality/keep_states.py ARTIFACT OUT KEPT FLAGS...
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from quantmill.common.program import run
from quantmill.quality import measure, reference

reference.SMALL = 0
artifact, out, kept, *flags = sys.argv[1:]
sys.argv[1:] = [artifact, out, "--engine", "transformers", "--write-reference", kept, *flags]
run(measure.main)
