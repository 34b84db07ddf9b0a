"""Prevent transformers from running Python code that comes with a model."""

from typing import Any, NoReturn

from transformers import dynamic_module_utils


def forbid() -> None:
    """Make transformers refuse to find and import a model's own code, whichever library asks.

    Without trust_remote_code it would ask at the terminal. gptqmodel and its tokenizer loader import what `auto_map`
    names in any case (docs/FOOTGUNS.md). All paths lead through these functions, in transformers 4 and 5.
    """
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    dynamic_module_utils.get_cached_module_file = _refuse
    dynamic_module_utils.get_class_in_module = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("it needs Python code of its own, which is not run")
