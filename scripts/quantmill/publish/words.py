"""Words that identify neither a machine nor its user: words of Quantmill's code, numbers, and a study's names.

A text in a result can come from a log, a device or a server, and name anything. It is published only if each of its
words is one of these, so no pattern of paths or addresses has to be complete.
"""

import getpass
import re
import socket
from collections.abc import Iterable, Iterator
from functools import cache

from quantmill.common.program import PACKAGE

SCRIPTS = PACKAGE.parent
WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*")
NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?(e[+-]?\d+)?([%x]|[A-Za-z]{1,3})?|p\d\d", re.ASCII)
VERSION = re.compile(r"\d+\.\d+(\.\d+)?")  # not four numbers, which may be an address
# between the parts of a name or a version: gptq-int4, Q4_K_M, 2.13.0.post1+cu130
JOINTS = re.compile(r"[-_.+=]")
PART = re.compile(r"\d+|v\d+|[a-z]?[0-9a-f]{7,40}|[A-Za-z]{1,2}\d{1,2}|(post|dev|rc|cu|rev)\d+", re.ASCII)
AROUND = "\"'`()[]{}<>|.,;:!?"  # punctuation around a word
# options and parameters of the study's config: names without slash, colon, at or tilde, with blanks and commas between
NAME = re.compile(r"[A-Za-z0-9_+-]+(\.\d[A-Za-z0-9_+-]*)*", re.ASCII)
ADDRESS = re.compile(r"[1-9]\d*\.\d+\.\d+\.\d+", re.ASCII)  # a version of four numbers is not published either
DIGEST = re.compile(r"[0-9a-f]{32,128}")
MARKS = re.compile(r"\((R|TM|C)\)|@ (?=\d)")  # in the name of a processor
OPTION = re.compile(r"--?[a-z][a-z0-9-]*(=.*)?|-?[a-z]", re.ASCII)
MODELS = ("model.gguf", "model.bin", "model.safetensors")
HERE = ("127.0.0.1", "0.0.0.0", "PORT")  # of a server that Quantmill started; they identify no machine


@cache
def vocabulary() -> frozenset[str]:
    """Return all words of Quantmill's programs and rules, in lower case."""
    files = [*SCRIPTS.rglob("*.py"), *(SCRIPTS.parent / "rules").rglob("*.smk")]
    return frozenset(word.lower() for file in files for word in WORD.findall(file.read_text(encoding="utf-8")))


@cache
def private() -> frozenset[str]:
    """Return the names of this machine and its user in lower case, without words of the vocabulary."""
    host = socket.gethostname().lower()
    try:
        user = getpass.getuser().lower()
    except (KeyError, OSError):  # a container's user without a name
        user = ""
    return frozenset({host, host.partition(".")[0], user}) - vocabulary() - {""}


def is_sentence(text: str, names: Iterable[str] = ()) -> bool:
    """Tell whether each word of a text is in the vocabulary, a number, a version, or one of a study's `names`."""
    known = frozenset(names)
    return text.isprintable() and all(_is_known(word, known) for word in _words(text, known))


def is_name(text: str) -> bool:
    """Tell whether a text consists of names, as options of engines and tools do, and none is this machine's."""
    parts = re.split(r"[,;]? |,", text)
    return all(NAME.fullmatch(part) and not ADDRESS.fullmatch(part) and not _is_private(part) for part in parts)


def is_device(text: str) -> bool:
    """Tell whether a text is the name of a processor or a GPU, as its driver or the kernel reports it."""
    return is_name(" ".join(MARKS.sub(" ", text).split()))


def is_command(text: str, names: Iterable[str] = ()) -> bool:
    """Tell whether a text is the arguments of a server, and all values are names, numbers or known words."""
    known = frozenset((*names, *HERE))
    values = [word.partition("=")[2] if OPTION.fullmatch(word) else word for word in text.split(" ")]
    return all(not value or value in known or _is_known(value, known) or _is_model(value, known) for value in values)


def _is_model(value: str, names: frozenset[str]) -> bool:
    """Tell whether a value is a file of an artifact, by the artifact's name."""
    folder, _, file = value.partition("/")
    return folder in names and file in MODELS


def _words(text: str, names: frozenset[str]) -> Iterator[str]:
    """Yield the words between blanks, without punctuation around them. One slash separates two words."""
    for word in text.split():
        bare = word.strip(AROUND).removesuffix("'s")
        if bare in names:
            continue
        left, slash, right = bare.partition("/")
        yield from (left, right) if slash and left and right else (bare,) if bare else ()


def _is_known(word: str, names: frozenset[str]) -> bool:
    if word in names:
        return True
    if _is_private(word):
        return False
    if word.lower() in vocabulary() or NUMBER.fullmatch(word) or VERSION.fullmatch(word) or DIGEST.fullmatch(word):
        return True
    parts = [part for part in JOINTS.split(word) if part]
    numbers = [part for part in parts if part.isdigit()]
    return (
        len(parts) > 1
        and len(numbers) < (4 if len(numbers) == len(parts) else 5)
        and all(part.lower() in vocabulary() or PART.fullmatch(part) for part in parts)
    )


def _is_private(word: str) -> bool:
    return not private().isdisjoint({word.lower(), *JOINTS.split(word.lower())})
