"""A server's metrics in Prometheus' text format: a line is `name{labels} value`."""

import re

VALUE = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|NaN|[-+]?Inf"
LINE = re.compile(rf"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{{[^}}]*\}})? ({VALUE})\s*")


def read(text: str) -> dict[str, float]:
    """Return each metric's sum over its labels; other lines are skipped."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found
