"""No Python that a model's folder brings or names runs here."""

from typing import Any, NoReturn

from transformers import dynamic_module_utils


def forbid() -> None:
    """Let transformers find and import no program of a model's, whoever asks.

    It asks at the terminal where it was not told. gptqmodel and its loader of tokenizers have it import what `auto_map`
    names whatever they were told (docs/FOOTGUNS.md). Every way leads through these functions, in 4 as in 5.
    """
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    dynamic_module_utils.get_cached_module_file = _refuse
    dynamic_module_utils.get_class_in_module = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("it wants Python of its own, which is not run")
