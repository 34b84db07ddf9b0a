"""What an interpreter that we start reads: neither the folder that its user works in, nor what the user tells Python.

The workflow clears the variables PYTHON* before each job's command (rules/common.smk). What a job finds of them was set
after that, by a wrapper script that `interpreters` names, and holds for this interpreter alone. PYTHONSAFEPATH keeps
the current folder out of `sys.path`, also in processes that libraries start.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2]
PREFIX = "PYTHON"  # of all variables that an interpreter reads
OURS = {"PYTHONNOUSERSITE": "1"}


def clear(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what the user tells Python, and without the packages in the user's home."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)} | OURS


def of_child(command: Sequence[Any], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a program that this one starts.

    `sys.executable` itself is told again what a wrapper script told it. Any other word for an interpreter names another
    environment, also where it is the same program: a system's Python may serve one as it is and one by a wrapper.

    Args:
        environment: what to begin with; this process's own, without it.
    """
    told = dict(os.environ if environment is None else environment)
    if command[0] is not sys.executable:
        told = clear(told)
    # an empty entry, as `PYTHONPATH=/packages:$PYTHONPATH` leaves, is the current folder
    paths = [path for path in told.pop("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != SCRIPTS]
    if paths:
        told["PYTHONPATH"] = os.pathsep.join(paths)
    return told | {"PYTHONSAFEPATH": "1"}
