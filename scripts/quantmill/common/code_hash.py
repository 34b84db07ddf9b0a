"""Which of our own files a program runs, so that an edit reruns what depends on it and nothing else."""

import ast
import hashlib
from functools import cache
from pathlib import Path


@cache
def closure(program: Path, root: Path) -> tuple[Path, ...]:
    """`program` and every module under `root`, the folder that it imports from, that it imports, directly or not.

    With a module comes the CUDA source beside it that has its name. Modules that are imported by name at run
    time (engines) are not found; their rules name them.
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
    """The files under `root` that an import of a dotted name runs: packages on the way, and the module if it is one."""
    first, *rest = name.split(".")
    if not (root / first).is_dir():
        rest = []
    bases = [root.joinpath(first, *rest[:length]) for length in range(len(rest) + 1)]
    files = (file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py"))
    return tuple(file for file in files if file.is_file())


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


@cache
def digest(*files: Path) -> str:
    """SHA-256 of the files' names and contents, in hexadecimal, whatever their order and times."""
    total = hashlib.sha256()
    for path in sorted(set(files)):
        total.update(f"{path.as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
