"""Which of our own files a program runs, so that an edit reruns what depends on it and nothing else."""

import ast
from functools import cache
from pathlib import Path


@cache
def closure(program: Path, root: Path) -> tuple[Path, ...]:
    """`program` and every module under `root`, the folder that it imports from, that it imports, directly or not.

    With a module comes the CUDA source beside it that has its name. Modules that are imported by name at run
    time (engines) are not found; their rules list them.
    """
    found: dict[Path, None] = {}
    waiting = [program]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        for name in imported_names(path):
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                base = root.joinpath(*parts[:length])
                waiting += [file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]
    beside = [source for path in found if (source := path.with_suffix(".cuh")).is_file()]
    return tuple(sorted([*found, *beside]))


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Dotted names that a Python file imports; `from a import b` gives `a.b`, whether b is a module or not."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)
