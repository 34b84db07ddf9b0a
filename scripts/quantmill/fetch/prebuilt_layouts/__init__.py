"""Somebody else's artifacts: for each layout, which files make one, and whether they are of this model.

A module has the name of its layout; `packed` is that of all others. It has

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

MAX_WORD = 100  # letters
MAX_NUMBER = 2**53  # what every reader of JSON can tell from the next


def is_packed(layout: str) -> bool:
    """Return whether a layout is safetensors with a quantization_config, which need no module of their own."""
    return importlib.util.find_spec(_module(layout)) is None


def of(layout: str) -> ModuleType:
    """Return the module of a layout: the one of its name, else `packed`."""
    return importlib.import_module(f"{__name__}.packed" if is_packed(layout) else _module(layout))


def _module(layout: str) -> str:
    return f"{__name__}.{layout.replace('-', '_')}"


def plain(words: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a stranger's parameters that the report can show: a number, yes or no, or a short word."""
    return {name: value for name, value in words.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_WORD and value.isprintable()
    return isinstance(value, int) and abs(value) < MAX_NUMBER
