"""The environment of interpreters that we start: without the current folder and the user's PYTHON* variables.

The workflow clears PYTHON* before each job's command (rules/common.smk). A job that finds some of them got them from a
wrapper script that `interpreters` names; they are meant for this interpreter alone. PYTHONSAFEPATH keeps the current
folder out of `sys.path`, also in processes that libraries start.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2]
PREFIX = "PYTHON"  # of all variables that configure an interpreter
OURS = {"PYTHONNOUSERSITE": "1"}


def clear(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the user's PYTHON* variables and the packages in the user's home."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)} | OURS


def of_child(command: Sequence[Any], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a program that this one starts.

    `sys.executable` keeps the PYTHON* variables that its wrapper script set. Any other interpreter is another
    environment, even if it is the same program: one name may be a wrapper of the other.

    Args:
        environment: the environment to start from; default: that of this process.
    """
    told = dict(os.environ if environment is None else environment)
    if command[0] is not sys.executable:
        told = clear(told)
    # an empty entry, as in `PYTHONPATH=/packages:$PYTHONPATH`, is the current folder
    paths = [path for path in told.pop("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != SCRIPTS]
    if paths:
        told["PYTHONPATH"] = os.pathsep.join(paths)
    return told | {"PYTHONSAFEPATH": "1"}
