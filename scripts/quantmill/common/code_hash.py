"""The source files that a program imports, and their hash: an edit reruns exactly what depends on it."""

import ast
import hashlib
from functools import cache
from pathlib import Path


@cache
def closure(program: Path, root: Path) -> tuple[Path, ...]:
    """Return `program` and all modules under `root` that it imports, directly or not.

    A module's CUDA source of the same name is included. Modules that are imported by name at run time (engines) are
    not found; their rules name them.

    Args:
        root: the folder that absolute imports start from.
    """
    found: dict[Path, None] = {}
    waiting = [program]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        for name in imported_names(path):
            waiting += modules(name, root)
    beside = [source for path in found if (source := path.with_suffix(".cuh")).is_file()]
    return tuple(sorted([*found, *beside]))


@cache
def modules(name: str, root: Path) -> tuple[Path, ...]:
    """Return the files under `root` that the import of a dotted name runs: its packages, and the module."""
    first, *rest = name.split(".")
    if not (root / first).is_dir():
        rest = []
    bases = [root.joinpath(first, *rest[:length]) for length in range(len(rest) + 1)]
    files = (file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py"))
    return tuple(file for file in files if file.is_file())


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Return the dotted names that a Python file imports; `from a import b` gives `a.b` for any b."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


@cache
def digest(*files: Path) -> str:
    """Return the hexadecimal SHA-256 of the files' names and contents, independent of order and times."""
    total = hashlib.sha256()
    for path in sorted(set(files)):
        total.update(f"{path.as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
