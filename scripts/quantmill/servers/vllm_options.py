"""Spellings of vLLM's options; without heavy imports, because plans read it too."""

from collections.abc import Mapping
from typing import Any

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
SHORTEST = 4  # letters of an abbreviated option


def value(options: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return an option's value, also if it is spelled with `-` or abbreviated, as argparse allows."""
    spelled = {option.replace("-", "_"): given for option, given in options.items()}
    short = (given for option, given in spelled.items() if len(option) >= SHORTEST and name.startswith(option))
    return spelled[name] if name in spelled else next(short, default)
