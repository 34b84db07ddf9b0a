"""What the programs that build artifacts share: their arguments, which rules/build.smk gives them."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quantmill import devices
from quantmill.common import program
from quantmill.common.program import UserError
from quantmill.gate import quality_gate


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the arguments of a program that builds an artifact."""
    arguments = program.parser(doc)
    arguments.add_argument("src", type=Path, help="the folder that it is built from")
    arguments.add_argument("dst", type=Path, help="the folder to write")
    arguments.add_argument("--format", help="the artifact's name; default: that of its folder")
    arguments.add_argument("--parameters", type=json.loads, default={}, help="JSON, in the tool's own words")
    arguments.add_argument("--seed", type=int, default=0)
    devices.add_arguments(arguments)
    arguments.add_argument("--layout", help="what its files are, such as gptq")
    arguments.add_argument("--engine", help="what runs it by default, and in the quality gate")
    arguments.add_argument("--engine-python", default=sys.executable, help="the interpreter of what runs the result")
    quality_gate.add_arguments(arguments)
    return arguments


def check_parameters(given: Any, names: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """Return what `--parameters` holds. Raises `UserError` for a name that is missing, or unknown."""
    wanted, known = {*names}, {*names, *optional}
    if not isinstance(given, dict) or not wanted <= {*given} <= known:
        names = ", ".join(sorted(known)) or "nothing"
        raise UserError(f"--parameters: {given} is not a JSON object of {names}")
    return given
