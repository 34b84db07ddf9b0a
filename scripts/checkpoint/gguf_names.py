"""What the files of a GGUF model are called."""

import re

SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")  # llama.cpp's own pattern, counted from 1


def split_names(name: str) -> list[str]:
    """The names of all files of the model of which a file of this name is one; itself alone where it is no part."""
    found = SPLIT.fullmatch(name)
    if not found or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]
