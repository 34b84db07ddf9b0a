"""The one reader of a results.json that a stranger wrote: bounded, valid and consistent.

Programs that compare and collect trust its result: numbers can be multiplied and turned to logarithms, texts can be
written, and each row has all figures of a measurement or none.
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
from quantmill.report.rows import Results, Row, Windows, value_of

MAX_BYTES, MAX_VALUES = 32 * 2**20, 1_000_000  # of results.json; with 30 rows it has 0.5 MB and 28,000 values
MAX_LEVELS = 50  # of nested values; ours have 7
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
    """A place in a file, and what is wrong there."""

    def __init__(self, where: Sequence[Any], what: str) -> None:
        super().__init__(f"{'.'.join(map(str, where)) or 'the file'}: {what}")


def read_results(path: Path) -> Results:
    """Read and check a results.json.

    Raises `UserError`, which names the place in the file, if it is not JSON, exceeds the size of any report, has
    figures of another version of the metrics, does not follow results.schema.json, or contradicts itself.
    """
    try:
        content = bounded_json.loads(plain_file.read(path, MAX_BYTES), MAX_BYTES, MAX_VALUES, _refuse)
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error!s:.80}); name a results.json") from None
    try:
        content = _clean(content)
        version = content.get("metrics_version") if isinstance(content, dict) else None
        if version is not None and version not in COMPARABLE:
            raise UserError(f"{path}: is of metrics version {version!s:.20}, not {METRICS_VERSION}; measure again")
        _check_schema(content)
        _check_pairs(content["rows"])
        for place, row in enumerate(content["rows"]):
            for where, what in _contradictions(row):
                raise _Wrong(("rows", place, *where), what)
            for name in (column.name for column in COLUMNS if value_of(row, column.name) is None):
                row["missing"].setdefault(name, UNTOLD)
            content["config"]["models"].setdefault(row["model"], {})
        check_together({str(path): content})
    except _Wrong as error:
        raise UserError(f"{path}: {printable(str(error)):.400} (see {SCHEMA.name}); make the report again") from None
    return content


def check_together(contents: Mapping[str, Results]) -> None:
    """Raise `UserError` if two rows of these files (by name) have the same windows of the same text, but different
    counts of its words: one of the two was changed, and their difference is not a figure."""
    seen: dict[Any, tuple[str, Any]] = {}
    for name, content in contents.items():
        for place, row in enumerate(content["rows"]):
            windows, protocol = row["quality_windows"], row["protocol"]["quality"]
            if not windows or not protocol:
                continue
            where = f"{name}: rows.{place}"
            text = protocol["text_sha256"], tuple(windows["tokens"])
            first, counts = seen.setdefault(text, (where, windows["counts"]))
            if counts != windows["counts"]:
                what = f"{where}.quality_windows.counts: other than those of {first}, of the same windows of one text"
                raise UserError(f"{what}; make the reports again")


def _refuse(constant: str) -> float:
    """Refuse NaN and infinity, which are neither JSON nor figures."""
    raise ValueError(f"{constant} stands where a figure is to be")


def _clean(content: Any, where: tuple[Any, ...] = ()) -> Any:
    """Return the content with tiny figures made zero. Raises `_Wrong` for numbers and texts that no report has."""
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


# JSON Schema takes 1e30 for an integer
_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int),
)


def _check_schema(content: Any) -> None:
    wrong = next(_Validator(schema()).iter_errors(content), None)
    if wrong is not None:
        while wrong.context:  # of several schemas the one that fits best: an object's, where null was allowed too
            wrong = max(wrong.context, key=lambda each: (len(each.absolute_path), each.validator != "type"))
        raise _Wrong(list(wrong.absolute_path), f"{wrong.message:.200}")


def _check_pairs(rows: Sequence[Row]) -> None:
    """Raise `_Wrong` if comparing all rows of one model with one another would take minutes."""
    for model, count in Counter(row["model"] for row in rows).items():
        windows = [len(found["nll"]) for row in rows if row["model"] == model and (found := row["quality_windows"])]
        if count**2 * max(windows, default=1) > MOST_PAIRS:
            what = f"{count} rows of {model!r:.80}, of {max(windows, default=1)} windows, are too many to compare"
            raise _Wrong(("rows",), what)


def _contradictions(row: Row) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield places in a row, and what is wrong there."""
    for part, names in (("quality", QUALITY), ("latency", SPEED)):
        protocol = value_of(row["protocol"], part)
        there = {name: value_of(row, name) is not None for name in names} | {f"protocol.{part}": bool(protocol)}
        if len(set(there.values())) > 1:
            has, lacks = (next(name for name, each in there.items() if each is way) for way in (True, False))
            yield (lacks,), f"is null, and {has} is not"
    for name in ("tokens_per_second", "deployed_tokens_per_second"):
        low, high = (value_of(row, f"{name}_{end}") for end in ("low", "high"))
        if low is not None and high is not None and low > high:
            yield (f"{name}_low",), f"is above {name}_high"
    if row["perplexity_ratio"] and row["perplexity"] is None:
        yield ("perplexity_ratio",), "is there without a perplexity"
    if degenerate := row["degenerate"]:
        for name in ("prompts", "first_token"):
            if bool(value_of(degenerate, name)) != bool(degenerate["loops"]):
                yield ("degenerate", name), "does not fit loops"
    if windows := row["quality_windows"]:
        yield from _windows(windows, row)


def _windows(windows: Windows, row: Row) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the same of a row's windows."""
    count = (row["protocol"]["quality"] or {})["windows"]
    for name in windows:
        if len(values := value_of(windows, name)) != count:
            yield ("quality_windows", name), f"has {len(values)} entries, and protocol.quality.windows is {count}"
    for nll, per in zip(windows["nll"], windows["counts"], strict=False):
        if abs(nll) > MOST_NATS * per:
            yield ("quality_windows", "nll"), f"has {nll:g} nats for {per:g} tokens or words; no perplexity is so large"
    if row["kld_mean"] is not None and "kld" not in windows:
        yield ("quality_windows", "kld"), "is missing, and kld_mean is not"
