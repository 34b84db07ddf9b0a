"""Numbers as people read them, the same on the page and in the README."""

MISSING = "\u2013"


def number(value: float | None, digits: int = 4) -> str:
    """A number of so many significant digits, without exponents; below 1e-6 zero; a dash for None."""
    if value is None:
        return MISSING
    if abs(value) < 1e-6:  # rounding noise of float16 and of sums
        return "0"
    text = f"{value:.{digits}g}"
    return f"{float(text):f}".rstrip("0").rstrip(".") if "e" in text else text


def size(value: float | None) -> str:
    """Bytes in decimal units."""
    if value is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{number(value, 3)} {unit}"
        value /= 1000
    return f"{number(value, 3)} TB"
