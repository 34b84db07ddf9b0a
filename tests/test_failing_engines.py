"""Whatever an engine's libraries raise is one line with the artifact's name; a fault of ours keeps its traceback."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import engines
from common import program
from common.program import UserError

ARTIFACT = Path("artifacts/m/f")


class Broken:
    """An engine that fails where it is told to."""

    modes, mode = ("broken",), "broken"

    def __init__(self, artifact: Path, device: str, threads: int, **errors: Any) -> None:
        self.errors = errors
        self.fail("load")

    def fail(self, where: str) -> None:
        found = self.errors.get(where)
        if callable(found):
            found()
        elif found:
            raise found

    def prefill_decode(self, ids: list[int], n: int) -> Iterator[tuple[int, float]]:
        yield 7, 0.0
        self.fail("decode")
        yield 8, 1.0

    def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
        self.fail("logits")
        yield np.zeros((len(ids), 3), np.float32)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(engines, "module", lambda name: SimpleNamespace(Engine=Broken))
    return lambda **errors: engines.load("broken", ARTIFACT, "cpu", 1, **errors)


@pytest.mark.parametrize("where", ["load", "decode", "logits"])
def test_what_a_library_raises_names_the_artifact_and_the_place(load: Callable[..., Any], where: str) -> None:
    came = []
    with pytest.raises(UserError) as caught:
        engine = load(**{where: RuntimeError("\n\n  sizes 41 and 40\ndo not match\n")})
        came.extend(engine.prefill_decode([1], 2) if where == "decode" else engine.logits([1]))
    place = f"{Path(__file__).name} line {Broken.fail.__code__.co_firstlineno + 5}"
    assert str(caught.value) == f"{ARTIFACT}: broken fails on it (RuntimeError: sizes 41 and 40; {place})"
    assert caught.value.__cause__ is None


def test_what_our_own_lines_raise_is_kept_as_its_cause(load: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"broken fails on it \(ZeroDivisionError: .*; __init__\.py line") as caught:
        list(load(logits=lambda: engines.chunk_positions(0)).logits([1]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "error", [UserError("as it is"), engines.CannotDecode("so"), OSError(28, "full"), MemoryError()]
)
def test_what_is_a_line_already_stays_it(load: Callable[..., Any], error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        list(load(decode=error).prefill_decode([1], 2))
    assert caught.value is error


def test_an_engine_that_works_is_as_it_was(load: Callable[..., Any]) -> None:
    engine = load()
    assert list(engine.prefill_decode([1], 2)) == [(7, 0.0), (8, 1.0)]
    assert [chunk.shape for chunk in engine.logits([1, 2])] == [(2, 3)]
    assert not hasattr(engine, "decode_batch")
    engine.mode = "other"
    assert engine.mode == "other"


def caused() -> None:
    try:
        fault()
    except KeyError as error:
        raise UserError("a line") from error


def fault() -> None:
    raise KeyError("x\ny")


def exhausted() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("main", "line", "traced"),
    [
        (caused, "error: a line", True),
        (fault, r"error: a fault of this program's: KeyError: 'x\ny'", True),
        (exhausted, "error: memory ran out, and nothing was published", False),
    ],
)
def test_a_program_ends_with_one_line_below_the_traceback(
    main: Callable[[], None], line: str, traced: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        program.run(main)
    assert str(caught.value.code).startswith(line)
    assert str(caught.value.code).isprintable()
    assert ("Traceback" in capsys.readouterr().err) == traced


def test_a_librarys_heading_takes_the_line_below_it_along() -> None:
    assert program.first_line(ValueError("\nField 'x':\n    expected int\n")) == "Field 'x': expected int"
    assert program.first_line(ValueError("a: b\nc")) == "a: b"
    assert program.first_line(ValueError("alone:")) == "alone:"
