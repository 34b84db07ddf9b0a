"""Artifacts that others built: which files make one of a layout, and whether it is of this model.

A module has the name of its layout; `packed` serves all layouts of safetensors with a quantization_config. A module has

- `local(path)`: return the files at a path that the config names, name in the artifact -> path. Headers that do not fit
  their files are refused here, before a byte is copied.
- `remote(repository, names, file)`: return the same of a repository's files, name in the artifact -> name there.
- `check(folder, model, layout)`: compare the files, now in a folder, with the folder of the model's safetensors. Return
  the manifest's `parameters`, `weight_files` and `weight_bytes_per_token`, and optionally `tool` and `unread`: the
  names and bytes of tensors that nothing reads.
- `gate_layout(folder)`, optional: return the module of scripts/quantmill/layouts that reads the weights; `source` if
  they are the model's own, None if no module reads them. Default: that of the layout.
- `beside(model)`, optional: return files of the model's folder that belong in the artifact, which has none of its own.

All raise `UserError` for what does not fit.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

MAX_WORD = 100  # letters
MAX_NUMBER = 2**53  # up to which every reader of JSON is exact


def is_packed(layout: str) -> bool:
    """Return whether a layout is safetensors with a quantization_config, which `packed` serves."""
    return importlib.util.find_spec(_module(layout)) is None


def of(layout: str) -> ModuleType:
    """Return the module of a layout: the one of its name, else `packed`."""
    return importlib.import_module(f"{__name__}.packed" if is_packed(layout) else _module(layout))


def _module(layout: str) -> str:
    return f"{__name__}.{layout.replace('-', '_')}"


def plain(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that the report can show: whole numbers, booleans and short words."""
    return {
        name: value
        for name, value in words.items()
        if (isinstance(value, str) and len(value) <= MAX_WORD and value.isprintable())
        or (isinstance(value, int) and abs(value) < MAX_NUMBER)
    }
