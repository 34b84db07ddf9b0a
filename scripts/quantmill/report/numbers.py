"""Numbers as text, the same on the page and in the README, and tables of them for a terminal."""

import math
from collections.abc import Collection, Sequence

MISSING = "\u2013"


def number(value: float | None, digits: int = 4) -> str:
    """Format a number to `digits` significant digits: whole ones in full, no exponents, 0 below 1e-6, None a dash."""
    if value is None:
        return MISSING
    if abs(value) < 1e-6:  # rounding noise of float16 and of sums
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def size(value: float | None) -> str:
    """Format bytes in decimal units."""
    if value is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{number(value, 3)} {unit}"
        value /= 1000
    return f"{number(value, 3)} TB"


def align(lines: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return lines of equally wide columns; those of `right` are aligned to the right."""
    columns = []
    for place, column in enumerate(zip(*lines, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if place in right else cell.ljust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
