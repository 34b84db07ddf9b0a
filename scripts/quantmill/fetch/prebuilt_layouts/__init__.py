"""Somebody else's artifacts: for each layout, which files make one, and whether they are of this model.

A module, which a layout of plan.registry names, has

- `local(path)`: the files of what the config names; the name of each in the artifact -> its path. Headers that do not
  fit their files are found here, before a byte is copied.
- `remote(repository, names, file)`: the same of a repository's files: the name in the artifact -> the one there.
- `check(folder, model, layout)`: hold the files, which lie in a folder now, against the folder of the model's
  safetensors; what the manifest says of them (`parameters`, `weight_files`, `weight_bytes_per_token`, maybe `tool`,
  and `unread`, the names and bytes of tensors that nothing reads).
- `gate_layout(folder, layout)`: the module of scripts/layouts that reads the weights; `source` where they are the
  model's own; None where we do not read them.
- `beside(model)`: files of the model's folder that belong into the artifact, which brings none of its own.

All raise `UserError` where something does not fit.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from quantmill.common.program import UserError

MAX_WORD = 100  # letters
MAX_NUMBER = 2**53  # what every reader of JSON can tell from the next


def module(name: str) -> ModuleType:
    """Return the module of this name. Raises `UserError` where there is none."""
    if not (name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}")):
        raise UserError(f"--checked-by {name}: there is no such module; see scripts/quantmill/fetch/prebuilt_layouts")
    return importlib.import_module(f"{__name__}.{name}")


def plain(words: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a stranger's parameters that the report can show: a number, yes or no, or a short word."""
    return {name: value for name, value in words.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_WORD and value.isprintable()
    return isinstance(value, int) and abs(value) < MAX_NUMBER
