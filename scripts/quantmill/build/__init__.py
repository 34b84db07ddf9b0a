"""The arguments and the last steps that all programs which build artifacts share; rules/build.smk calls them."""

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from quantmill import devices
from quantmill.checkpoint import shards
from quantmill.common import manifest, program
from quantmill.common.program import UserError
from quantmill.gate import quality_gate


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the arguments of a program that builds an artifact."""
    arguments = program.parser(doc)
    arguments.add_argument("src", type=Path, help="folder to build from")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--format", help="the artifact's name; default: that of its folder")
    arguments.add_argument("--parameters", type=json.loads, default={}, help="JSON, in the tool's own words")
    arguments.add_argument("--seed", type=int, default=0)
    devices.add_arguments(arguments)
    arguments.add_argument("--layout", help="how the artifact stores its weights, such as gptq")
    arguments.add_argument("--engine", help="what runs it by default, and in the quality gate")
    arguments.add_argument("--engine-python", default=sys.executable, help="the engine's interpreter")
    quality_gate.add_arguments(arguments)
    return arguments


def check_parameters(given: Any, names: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return the object of `--parameters`. Raises `UserError` for a missing or an unknown name."""
    if not isinstance(given, dict) or not {*names} <= {*given} <= {*names, *optional}:
        known = ", ".join(sorted({*names, *optional})) or "nothing"
        raise UserError(f"--parameters: {given} is not a JSON object of {known}")
    return given


def finish(folder: Path, options: argparse.Namespace, layout: str | None, **facts: Any) -> None:
    """Have the quality gate check an artifact, then write its manifest, which completes it.

    Args:
        layout: how it stores its weights; see `quality_gate.check`.
        facts: those of `manifest.write`; `parameter_count` is by default the language model's in `options.src`.

    Raises `UserError` where the gate refuses the artifact.
    """
    gate = quality_gate.check(folder, layout, options)
    facts |= {"format": options.format or options.dst.name, "engine": options.engine, "gate": gate}
    if "parameter_count" not in facts:
        facts["parameter_count"] = shards.text_parameters(options.src)
    manifest.write(folder, source=manifest.read(options.src)["source"], **facts)
