"""Run one of Quantmill's programs: python scripts/quantmill ROOM.PROGRAM ARGUMENTS. Alone it lists them."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt during imports shows no traceback

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # not this folder: its rooms must not hide libraries of the same name


def programs() -> dict[str, str]:
    """Return the programs' names and the first lines of their docstrings."""
    found = {}
    for file in sorted(HERE.glob("*/*.py")):
        text = file.read_text(encoding="utf-8")
        if "\ndef main(" in text or "\nmain = " in text:
            found[f"{file.parent.name}.{file.stem}"] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main() -> None:
    from quantmill.common.program import run, suggestion

    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(__doc__, "", *(f"{each:<28} {line}" for each, line in programs().items()), sep="\n")
        return
    room, _, stem = name.partition(".")
    if not (stem.isidentifier() and (HERE / room / f"{stem}.py").is_file()):
        sys.exit(f"error: there is no program {name!r}{suggestion(name, programs())}")
    del sys.argv[1]
    sys.argv[0] = f"quantmill {name}"
    module = importlib.import_module(f"quantmill.{name}")
    run(module.main, getattr(module, "ERROR", 1))


main()
