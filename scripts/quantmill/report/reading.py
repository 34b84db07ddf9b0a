"""The one way in for a results.json that a stranger wrote: bounded, valid, and such that its parts fit one another.

Programs that compare and collect believe what they get from here: numbers can be multiplied and turned to logarithms,
texts can be written, and each row has all figures of a measurement or none.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from quantmill.common import bounded_json, plain_file
from quantmill.common.program import UserError, printable
from quantmill.metrics import COMPARABLE, METRICS_VERSION
from quantmill.report.columns import COLUMNS, SCHEMA, schema
from quantmill.report.results import upgrade

MAX_BYTES, MAX_VALUES = 32 * 2**20, 1_000_000  # of results.json; with 30 rows it has 0.5 MB and 28,000 values
MAX_LEVELS = 50  # of values in one another; of ours 7
MAX_TEXT, MAX_NAME = 20_000, 500  # characters of a text and of a key
LARGEST, SMALLEST = 1e60, 1e-60  # of figures: ratios of these, and their squares, are float64; below it is zero
MOST_NATS = 300  # of a window, over what they are divided by: exp of a difference of two such is a float64
MOST_PAIRS = 2_000_000  # rows of a model, squared, times windows: each pair draws windows 10,000 times; of ours 130,000
UNTOLD = "the file does not say why"
INTEGERS = range(-(2**53), 2**53 + 1)  # which float64 holds, and the page's scripts
QUALITY = ("perplexity", "quality_summary", "quality_windows", "quality_totals", "headline", "normalised")
SPEED = (
    *("device", "device_details", "interference", "latency_summary"),
    *("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high"),
)
WIDE = "normalised"  # its perplexities are as large as float64 holds, and nothing is calculated from them


class _Wrong(Exception):
    """Where in a file something is wrong, and what."""

    def __init__(self, where: Sequence[Any], what: str) -> None:
        super().__init__(f"{'.'.join(map(str, where)) or 'the file'}: {what}")


def read(path: Path) -> dict[str, Any]:
    """The content of a results.json, upgraded to today's schema version.

    Raises `UserError`, which names the place in the file, where it is not JSON, has more than a report has, has figures
    of another version of the metrics, does not follow results.schema.json, or contradicts itself.
    """
    try:
        content = bounded_json.loads(plain_file.read(path, MAX_BYTES), MAX_BYTES, MAX_VALUES, _refuse)
    except ValueError as error:
        raise UserError(f"{path}: is no JSON ({error!s:.80}); name a results.json") from None
    try:
        content = _clean(content)
        version = content.get("metrics_version") if isinstance(content, dict) else None
        if version is not None and version not in COMPARABLE:
            raise UserError(f"{path}: is of metrics version {version!s:.20}, not {METRICS_VERSION}; measure again")
        try:
            content = upgrade(content) if isinstance(content, dict) else content
        except (KeyError, TypeError, AttributeError):  # what the schema says of it is of today's version
            raise UserError(f"{path}: does not fit its schema version; make the report again") from None
        _check_schema(content)
        _check_pairs(content["rows"])
        for place, row in enumerate(content["rows"]):
            for where, what in _contradictions(row):
                raise _Wrong(("rows", place, *where), what)
            _complete(row, content["config"]["models"])
        check_together({str(path): content})
    except _Wrong as error:
        raise UserError(f"{path}: {printable(str(error)):.400} (see {SCHEMA.name}); make the report again") from None
    return content


def check_together(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `UserError` where two rows of these files (by name) have the same windows of the same text, and other
    counts of its words: one of the two was changed, and their difference is not a figure."""
    seen: dict[Any, tuple[str, Any]] = {}
    for name, content in contents.items():
        for place, row in enumerate(content["rows"]):
            if not (windows := row["quality_windows"]):
                continue
            where = f"{name}: rows.{place}"
            text = row["protocol"]["quality"]["text_sha256"], tuple(windows["tokens"])
            first, counts = seen.setdefault(text, (where, windows["counts"]))
            if counts != windows["counts"]:
                what = f"{where}.quality_windows.counts: other than those of {first}, of the same windows of one text"
                raise UserError(f"{what}; make the reports again")


def _refuse(constant: str) -> float:
    """NaN and infinity are no JSON, and no figure."""
    raise ValueError(f"{constant} stands where a figure is to be")


def _clean(content: Any, where: tuple[Any, ...] = ()) -> Any:
    """The same content, its figures too small to matter made zero. Raises `_Wrong` for numbers and texts that no report
    has, whatever they stand for."""
    if len(where) > MAX_LEVELS:
        raise _Wrong(where[:5], f"is nested more than {MAX_LEVELS} deep")
    if isinstance(content, dict):
        for name in content:
            _check_text(name, (*where, "a key"), MAX_NAME)
        return {name: _clean(each, (*where, name)) for name, each in content.items()}
    if isinstance(content, list):
        return [_clean(each, (*where, place)) for place, each in enumerate(content)]
    if isinstance(content, str):
        _check_text(content, where, MAX_TEXT)
    elif isinstance(content, int) and content not in INTEGERS:
        raise _Wrong(where, "is a whole number beyond 2^53")
    elif isinstance(content, float):
        if not math.isfinite(content) or (abs(content) > LARGEST and WIDE not in where):
            raise _Wrong(where, f"is {content:g}, and no figure is above {LARGEST:g}")
        return content if abs(content) >= SMALLEST else 0.0
    return content


def _check_text(text: str, where: Sequence[Any], most: int) -> None:
    if len(text) > most:
        raise _Wrong(where, f"is a text of {len(text)} characters, and {most} are the most")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _Wrong(where, "is a text with half a character (a lone surrogate), which cannot be written")


def _is_integer(_: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# JSON Schema takes 1e30 for an integer
_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def _check_schema(content: Any) -> None:
    wrong = next(_Validator(schema()).iter_errors(content), None)
    if wrong is not None:
        while wrong.context:  # of several schemas the one that fits best: an object's, where null was allowed too
            wrong = max(wrong.context, key=lambda each: (len(each.absolute_path), each.validator != "type"))
        raise _Wrong(list(wrong.absolute_path), f"{wrong.message:.200}")


def _check_pairs(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises `_Wrong` where rows of one model, all of which are compared with one another, would take minutes."""
    for model, count in Counter(row["model"] for row in rows).items():
        windows = [
            len(row["quality_windows"]["nll"]) for row in rows if row["model"] == model and row["quality_windows"]
        ]
        if count**2 * max(windows, default=1) > MOST_PAIRS:
            what = f"{count} rows of {model!r:.80}, of {max(windows, default=1)} windows, are too many to compare"
            raise _Wrong(("rows",), what)


def _complete(row: dict[str, Any], models: dict[str, Any]) -> None:
    """Give a row a reason for each empty column, and its model an empty config, where the file has none."""
    for column in COLUMNS:
        if row[column.name] is None:
            row["missing"].setdefault(column.name, UNTOLD)
    models.setdefault(row["model"], {})


def _contradictions(row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Places in a row, and what is wrong there."""
    for part, names in (("quality", QUALITY), ("latency", SPEED)):
        there = {name: row[name] is not None for name in names} | {f"protocol.{part}": bool(row["protocol"][part])}
        if len(set(there.values())) > 1:
            has, lacks = (next(name for name, each in there.items() if each is way) for way in (True, False))
            yield (lacks,), f"is null, and {has} is not"
    if row["tokens_per_second"] is not None and row["tokens_per_second_low"] > row["tokens_per_second_high"]:
        yield ("tokens_per_second_low",), "is above tokens_per_second_high"
    if row["perplexity_ratio"] and row["perplexity"] is None:
        yield ("perplexity_ratio",), "is there without a perplexity"
    for name, figure in (("prompts", len), ("first_token", bool)):
        degenerate = row["degenerate"]
        if degenerate and bool(degenerate[name]) != bool(figure(degenerate["loops"])):
            yield ("degenerate", name), "does not fit loops"
    if windows := row["quality_windows"]:
        yield from _windows(windows, row)


def _windows(windows: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The same of a row's windows."""
    count = row["protocol"]["quality"]["windows"]
    for name, values in windows.items():
        if len(values) != count:
            yield ("quality_windows", name), f"has {len(values)} entries, and protocol.quality.windows is {count}"
    for nll, per in zip(windows["nll"], windows["counts"], strict=False):
        if abs(nll) > MOST_NATS * per:
            yield ("quality_windows", "nll"), f"has {nll:g} nats for {per:g} tokens or words; no perplexity is so large"
    if row["kld_mean"] is not None and "kld" not in windows:
        yield ("quality_windows", "kld"), "is missing, and kld_mean is not"
