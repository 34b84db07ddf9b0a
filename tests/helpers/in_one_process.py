"""Run one of our programs several times in one process, whose libraries are imported once.

    python tests/helpers/in_one_process.py PROGRAM < COMMANDS.json

COMMANDS is a list of the arguments of each run, in one line; the runs read what follows it. A line of JSON for each:
what it ended with, None where it went well, and what it printed to standard error.
"""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from quantmill.common.program import run

main = importlib.import_module(f"quantmill.{sys.argv[1]}").main
for arguments in json.loads(sys.stdin.readline()):
    sys.argv[1:] = arguments
    code, printed = None, io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            run(main)
    except SystemExit as end:
        code = end.code
    print(json.dumps({"end": code, "printed": printed.getvalue()}))
