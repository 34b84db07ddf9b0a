"""Names of the files of a GGUF model."""

import re
from collections.abc import Iterable

SPLIT = re.compile(r"([^.].*)-([0-9]{5})-of-([0-9]{5})\.gguf")  # llama.cpp's own pattern, counted from 1


def split_names(name: str) -> list[str]:
    """Return the names of all files of the model that a file of this name belongs to; itself if it is not a part."""
    found = SPLIT.fullmatch(name)
    if not found or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]


def models(names: Iterable[str]) -> list[list[str]]:
    """Return the models that files of these names belong to, each with all names that it should have."""
    return [list(model) for model in dict.fromkeys(tuple(split_names(name)) for name in names)]
