"""How vLLM's options are spelled; light, since plans read it too."""

from collections.abc import Mapping
from typing import Any

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
SHORTEST = 4  # letters of an option that is shortened


def value(options: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """An option's value, also where it is written with `-` or shortened, as argparse allows."""
    spelled = {option.replace("-", "_"): given for option, given in options.items()}
    short = (given for option, given in spelled.items() if len(option) >= SHORTEST and name.startswith(option))
    return spelled[name] if name in spelled else next(short, default)
