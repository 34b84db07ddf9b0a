"""The quality gate as builders call it: gate.check in another process, before the artifact gets its name."""

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
    """Add the gate's arguments. Without a reference nothing is checked."""
    arguments.add_argument("--gate-reference", type=Path, help="what gate.expected wrote for the source")
    arguments.add_argument("--gate-evaluation", type=Path, help="the tokenised evaluation text")
    arguments.add_argument("--gate-protocol", default="gptq-2048", help="how that is cut into windows")
    arguments.add_argument("--gate-options", help="JSON: the engine's options, in its own words")
    arguments.add_argument("--gate-stream", action="store_true", help="run models of transformers block by block")
    arguments.add_argument("--gate-gpus", type=int, default=1, help="GPUs that the engine runs on")
    arguments.add_argument("--gate-factor", type=float, default=100, help="of the reference's perplexity, at most")
    arguments.add_argument("--gate-python", type=Path, default=sys.executable, help="an interpreter with transformers")


def check(folder: Path, layout: str | None, options: argparse.Namespace) -> dict[str, Any] | None:
    """Load an artifact in a new process and compare its engine's predictions with transformers', from the same weights.

    Return the findings and the seconds taken, or None without a `--gate-reference`.

    Args:
        layout: how the artifact stores its weights, a module of quantmill.layouts; `source` for the source's own
            weights; None for a layout that Quantmill does not read, which the report then says.
        options: of `add_arguments`; also `src`, `dst`, `device`, `engine` and `engine_python`, its interpreter.

    Raises `UserError` where the artifact does not load, or is not what it should be.
    """
    if options.gate_reference is None:
        return None
    started = time.monotonic()
    work = options.dst.with_name(f".{options.dst.name}.gate")
    shutil.rmtree(work, ignore_errors=True)  # of a job that was killed
    work.mkdir()
    try:
        text = ["--evaluation", options.gate_evaluation, "--protocol", options.gate_protocol]
        text += ["--device", options.device, *(["--stream"] if options.gate_stream else [])]
        against: list[Any] = []
        if layout is None:
            against = ["--unchecked", UNREAD]
        elif layout != "source":
            against = ["--expected", work / "expected.json"]
            weights = ["--artifact", folder, "--layout", layout]
            _run(options, options.gate_python, "gate.expected", options.src, against[1], *weights, *text)
        run = ["--engine", options.engine, "--gpus", options.gate_gpus, "--factor", options.gate_factor]
        run += ["--options", options.gate_options] if options.gate_options else []
        run += ["--reference", options.gate_reference, *against, *text]
        _run(options, options.engine_python, "gate.check", folder, work / "gate.json", *run)
        found = json.loads((work / "gate.json").read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found | {"seconds": round(time.monotonic() - started, 3)}


def _run(options: argparse.Namespace, python: str | Path, name: str, *arguments: Any) -> None:
    """Run a program. Raises `UserError` with its last line where it fails."""
    result = run_child([*program.command(name, python), *arguments])
    if result.returncode < 0:
        raise UserError(f"{options.dst}: the quality gate was killed by signal {-result.returncode}; memory short?")
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
        raise UserError(f"{options.dst}: refused by the quality gate: {last}")
