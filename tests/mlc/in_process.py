"""Run a program of Quantmill's in the tests' own process, whose libraries are imported once."""

import contextlib
import importlib
import io
import signal
import sys
from types import SimpleNamespace

import pytest

from quantmill.common.program import run


def run_program(name: str, *arguments: object, **environment: str) -> SimpleNamespace:
    """Return its exit status as `returncode`, and what it printed to standard error as `stderr`."""
    printed, status = io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setattr(signal, "signal", lambda *_: None)
        for key, value in ({"PYTHONSAFEPATH": "1"} | environment).items():
            patch.setenv(key, value)
        try:
            run(importlib.import_module(f"quantmill.{name}").main)
        except SystemExit as end:
            status = end.code
    message = f"{status}\n" if isinstance(status, str) else ""  # Python prints it at its end
    return SimpleNamespace(returncode=1 if message else status or 0, stderr=printed.getvalue() + message)
