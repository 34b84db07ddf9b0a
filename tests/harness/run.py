"""Run one of our programs with the engines of tests/harness/engines beside the real ones.

PROGRAM=latency python tests/harness/run.py ARTIFACT OUT --engine fake ...

The name is in the environment because programs that start themselves again pass their arguments on as they are.
"""

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

import engines  # noqa: E402
from common.program import run  # noqa: E402

engines.__path__.append(str(HERE / "engines"))

if __name__ == "__main__":
    run(importlib.import_module(os.environ["PROGRAM"]).main)
