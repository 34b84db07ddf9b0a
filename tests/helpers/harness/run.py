"""Run one of our programs with the engines of tests/helpers/harness/engines in addition to the real ones.

python tests/helpers/harness/run.py latency.measure ARTIFACT OUT --engine fake ...
"""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "scripts"))

from quantmill import engines  # noqa: E402
from quantmill.common.program import run  # noqa: E402
from quantmill.devices import cpu  # noqa: E402
from quantmill.latency import worker  # noqa: E402
from quantmill.loads import client_ceiling  # noqa: E402
from quantmill.loads import worker as loading  # noqa: E402

engines.__path__.append(str(HERE / "engines"))
cpu.COPY_BYTES = 2**20  # no test depends on the machine's bandwidth
client_ceiling.measure.__defaults__ = (100, 1, client_ceiling.PACE)  # a tenth of the events, once
# the processes that latency and load start, too
worker.COMMAND = [sys.executable, __file__, "latency.worker"]
loading.COMMAND = [sys.executable, __file__, "loads.worker"]

if __name__ == "__main__":
    run(importlib.import_module(f"quantmill.{sys.argv.pop(1)}").main)
