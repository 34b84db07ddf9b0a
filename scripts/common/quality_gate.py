"""How programs that build artifacts have them scored before they publish."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.program import UserError

GATE = Path(__file__).resolve().parents[1] / "gate.py"


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    """What the gate needs; without a reference nothing is scored."""
    arguments.add_argument("--gate-reference", type=Path, help="what gate.py wrote for the reference")
    arguments.add_argument("--gate-evaluation", type=Path, help="the tokenised evaluation text")
    arguments.add_argument("--gate-protocol", default="gptq-2048", help="by which the reference was scored")
    arguments.add_argument("--gate-factor", type=float, default=1.5, help="of the reference's perplexity, at most")


def check(folder: Path, engine: str, device: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Load an artifact afresh in another process and score it; what was found and the seconds that it took, or None
    where nothing was asked.

    Raises `UserError` where the artifact does not load, or its perplexity is beyond the limit.
    """
    if options.gate_reference is None:
        return None
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "gate.json")
        command = [sys.executable, GATE, folder, out, "--engine", engine, "--device", device]
        command += ["--evaluation", options.gate_evaluation, "--reference", options.gate_reference]
        command += ["--protocol", options.gate_protocol, "--factor", options.gate_factor]
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if result.returncode < 0:
            raise UserError(f"{options.dst}: the quality gate was killed by signal {-result.returncode}; memory short?")
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
            raise UserError(f"{options.dst}: refused by the quality gate: {last}")
        return json.loads(out.read_text(encoding="utf-8")) | {"seconds": round(time.monotonic() - started, 3)}
