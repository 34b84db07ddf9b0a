"""Checks of a config's values that hold for any key."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from quantmill.common import plain_file
from quantmill.common.program import UserError

MAX_BYTES = 2**20  # of a file
# they break a line of a log or a shell's argument, or are not in UTF-8
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
SNAKEMAKE = re.compile(r"[{}<>]")  # its wildcards and path variables
FREE = ("join", "column", "repository")  # keys whose text goes to a program as it is, or has a pattern of its own
FORBIDDEN_IN_FREE = re.compile("[\0\ud800-\udfff]")


class ConfigError(ValueError):
    """One line: which key, what is wrong, what to do."""


def check_values(config: Any) -> None:
    """Raise `ConfigError` for infinite numbers and for text that a path, an argument or a log's line cannot contain."""
    if not isinstance(config, dict):
        raise ConfigError(f"config: a {type(config).__name__}, not keys and values; write `models:` and what follows")
    _check_value(config, "config", "")


def _check_value(value: Any, where: str, key: str) -> None:
    if isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):  # a number, say
                raise ConfigError(f"{where}: the name {name!r:.60} is not text in YAML; put it in quotes")
            _check_text(name, f"{where}: the key {name!r:.60}")
            _check_value(each, name if where == "config" else f"{where}.{name}", name)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _check_value(each, f"{where}.{number}", key)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} is not a finite number; write one")
    elif isinstance(value, str) and key in FREE:
        if FORBIDDEN_IN_FREE.search(value):
            raise ConfigError(f"{where}: {value!r:.60} has a NUL or half a surrogate pair; remove it")
    elif isinstance(value, str):
        _check_text(value, f"{where}: {value!r:.60}")
    elif value is not None and not isinstance(value, bool | int | float):
        raise ConfigError(f"{where}: a {type(value).__name__} in YAML, which no key takes; put a text in quotes")


def is_plain(name: str) -> bool:
    """Return whether Snakemake accepts a file of this name, which need not be UTF-8."""
    return not CONTROL.search(name) and not SNAKEMAKE.search(name)


def _check_text(text: str, what: str) -> None:
    if found := CONTROL.search(text):
        raise ConfigError(f"{what} has {found[0]!r}, which no name may have; remove it")
    if found := SNAKEMAKE.search(text):
        raise ConfigError(f"{what} has {found[0]}, which Snakemake interprets; rename the file, or link to it")
    if text.startswith("-"):
        raise ConfigError(f"{what} begins with -, which programs take for an option; write ./ before it, or rename it")


def check_file(path: Path) -> None:
    """Raise `ConfigError` for a config file that cannot be read, or that has a key twice.

    Snakemake would use the last one, and a model would be lost. JSON is tried first, as Snakemake does. A key may
    replace one that YAML's `<<` merges.
    """
    try:
        data = plain_file.read(path, MAX_BYTES)
    except UserError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a study's YAML") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: over {MAX_BYTES >> 20} MiB, the limit of a study")
    try:
        text = data.decode("utf-8")
        try:
            json.loads(text, object_pairs_hook=lambda pairs: _check_unique(path, [key for key, _ in pairs]))
        except ConfigError:
            raise
        except ValueError:
            root = yaml.compose(text, yaml.SafeLoader)
            _check_keys(path, root, set())
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep; a study has few levels") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is not YAML ({' '.join(str(error).split()):.200})") from None


def _check_keys(path: Path, node: yaml.Node | None, seen: set[int]) -> None:
    """Check each mapping below a node once, even where several aliases lead to it."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names = [
            key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"
        ]
        _check_unique(path, [key.value for key in names], [key.start_mark.line + 1 for key in names])
        for pair in node.value:
            for each in pair:
                _check_keys(path, each, seen)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_keys(path, each, seen)


def _check_unique(path: Path, keys: list[str], lines: list[int] | None = None) -> None:
    twice, count = Counter(keys).most_common(1)[0] if keys else ("", 1)
    if count > 1:
        places = [f"line {line}" for key, line in zip(keys, lines, strict=True) if key == twice] if lines else []
        where = f" ({' and '.join(places)})" if places else ""
        raise ConfigError(f"{path}: the key {twice!r:.60} occurs {count} times{where}; keep one")
