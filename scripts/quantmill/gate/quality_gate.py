"""How programs that build artifacts have them checked before they publish: first faithful, then sane (gate.check)."""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from quantmill.common import program
from quantmill.common.program import UserError, run_child

UNREAD = "Quantmill does not read its format"


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    """What the gate needs; without a reference nothing is checked."""
    arguments.add_argument("--gate-reference", type=Path, help="what gate.expected wrote for the source")
    arguments.add_argument("--gate-evaluation", type=Path, help="the tokenised evaluation text")
    arguments.add_argument("--gate-protocol", default="gptq-2048", help="how that is cut into windows")
    arguments.add_argument("--gate-options", help="JSON: the engine's options, in its own words")
    arguments.add_argument("--gate-gpus", type=int, default=1, help="cards that the engine runs on")
    arguments.add_argument("--gate-factor", type=float, default=100, help="of the reference's perplexity, at most")
    arguments.add_argument("--gate-python", type=Path, default=sys.executable, help="an interpreter with transformers")


def check(
    folder: Path,
    engine: str,
    layout: str | None,
    device: str,
    options: argparse.Namespace,
    python: str | Path = sys.executable,
) -> dict[str, Any] | None:
    """Load an artifact afresh in another process, and hold what its engine predicts against transformers with the same
    weights; what was found and the seconds that it took, or None where nothing was asked.

    Args:
        layout: how the artifact stores its weights, a module of scripts/layouts; `source` where they are the source's
            own; None where we do not read them, which the report then says.
        python: the engine's interpreter.

    Raises `UserError` where the artifact does not load, or is not what it should be.
    """
    if options.gate_reference is None:
        return None
    started = time.monotonic()
    work = options.dst.with_name(f".{options.dst.name}.gate")
    shutil.rmtree(work, ignore_errors=True)  # of a job that was killed
    work.mkdir()
    try:
        text = ["--evaluation", options.gate_evaluation, "--protocol", options.gate_protocol, "--device", device]
        against: list[Any] = []
        if layout is None:
            against = ["--unchecked", UNREAD]
        elif layout != "source":
            against = ["--expected", work / "expected.json"]
            weights = ["--artifact", folder, "--layout", layout]
            _run(options, options.gate_python, "gate.expected", options.src, against[1], *weights, *text)
        run = ["--engine", engine, "--gpus", options.gate_gpus]
        run += ["--options", options.gate_options] if options.gate_options else []
        reference = ["--reference", options.gate_reference, "--factor", options.gate_factor]
        _run(options, python, "gate.check", folder, work / "gate.json", *run, *reference, *against, *text)
        found = json.loads((work / "gate.json").read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found | {"seconds": round(time.monotonic() - started, 3)}


def _run(options: argparse.Namespace, python: str | Path, name: str, *arguments: Any) -> None:
    """Raises `UserError` with the program's own last line where it fails."""
    result = run_child([*program.command(name, python), *arguments])
    if result.returncode < 0:
        raise UserError(f"{options.dst}: the quality gate was killed by signal {-result.returncode}; memory short?")
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
        raise UserError(f"{options.dst}: refused by the quality gate: {last}")
