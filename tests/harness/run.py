"""Run one of our programs with the engines of tests/harness/engines beside the real ones.

python tests/harness/run.py latency ARTIFACT OUT --engine fake ...
"""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

import engines  # noqa: E402
from common.program import run  # noqa: E402
from loading import process as loading  # noqa: E402
from timing import process  # noqa: E402

engines.__path__.append(str(HERE / "engines"))
# the processes that latency and load start, too
process.COMMAND = [sys.executable, __file__, "timing.process"]
loading.COMMAND = [sys.executable, __file__, "loading.process"]

if __name__ == "__main__":
    run(importlib.import_module(sys.argv.pop(1)).main)
