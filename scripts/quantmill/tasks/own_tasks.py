"""Check the user's task YAMLs before lm-evaluation-harness reads them: they may name files of their folder alone."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lm_eval.tasks import _yaml_loader
from lm_eval.tasks._yaml_loader import load_yaml

from quantmill.common.program import UserError

OWN = Path(_yaml_loader.__file__).parent  # lm-evaluation-harness' own tasks
LARGEST = 4 * 2**20  # bytes of a YAML file; the harness' own have at most 100 KB
DEEPEST = 50  # nested values; libyaml's C code overflows the stack at some tens of thousands
MOST_VALUES = 100_000  # of a file with its aliases spelled out; asdict() copies each of them
PROMPTS = "use_prompt"  # names another file by any path, which get_prompt opens


def check(include: Path) -> None:
    """Check each YAML file of a folder that lm-evaluation-harness would find.

    Raises `UserError` for a file that is not a plain one of at most `LARGEST` bytes, is outside the folder or includes
    such a file, names prompts of another file, or has more than `MOST_VALUES` values with its aliases.
    """
    root = include.resolve()
    for folder, _, names in os.walk(include):
        for name in sorted(names):
            if name.endswith((".yaml", ".yml")):
                _check_file(Path(folder, name), root)


def _check_file(path: Path, root: Path) -> None:
    """Check one file of the folder `root`. Files that it includes are checked when the folder is walked."""
    _check_place(path, path, root)
    try:
        _check_depth(path)
        content = load_yaml(path, resolve_func=False, recursive=False)
    except (yaml.YAMLError, ValueError):  # the index skips it too, so its task does not exist
        return
    _check_values(content, path)
    includes = content.get("include") or []
    for named in includes if isinstance(includes, list) else [includes]:
        if not isinstance(named, str):
            raise UserError(f"{path}: include is {named!r:.60}, not the name of a file; correct it")
        _check_place(path.parent / named, path, root)


def _check_place(path: Path, namer: Path, root: Path) -> None:
    """Raise `UserError` for a file that is outside `root` and the harness' own tasks, is not plain, or is too large."""
    real = path.resolve()
    if not (real.is_relative_to(root) or real.is_relative_to(OWN)):
        raise UserError(f"{namer}: leads to {path}, outside of tasks.include; copy that file into the folder")
    if not path.exists():
        raise UserError(f"{namer}: includes {path}, which is not there; correct the name")
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
        raise UserError(f"{path}: is not a plain file of at most {LARGEST // 2**20} MiB; remove it from tasks.include")


def _check_depth(path: Path) -> None:
    """Check the nesting of a file by its events, for which libyaml needs no stack."""
    depth = 0
    with path.open("rb") as file:
        for event in yaml.parse(file, Loader=yaml.CSafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise UserError(f"{path}: nests more than {DEEPEST} values; write it flatter")


def _check_values(content: Any, path: Path) -> None:
    """Check all values, and each alias as often as it occurs."""
    waiting, seen = [content], 0
    while waiting:
        seen += 1
        if seen > MOST_VALUES:
            raise UserError(f"{path}: holds more than {MOST_VALUES} values with its aliases; write it shorter")
        value = waiting.pop()
        if isinstance(value, Mapping):
            if value.get(PROMPTS) is not None:
                raise UserError(f"{path}: {PROMPTS} names prompts of another file; write them as doc_to_text")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
