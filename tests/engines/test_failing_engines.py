"""Whatever an engine's libraries raise is one line with the artifact's name; a fault of ours keeps its traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import REPO

from quantmill import engines
from quantmill.common import program
from quantmill.common.program import UserError

ARTIFACT = Path("artifacts/m/f")


class Broken(engines.Engine):
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

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        yield 0, 7, 0.0
        self.fail("decode")
        yield 0, 8, 1.0

    def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
        self.fail("logits")
        yield np.zeros((len(ids), 3), np.float32)

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        self.fail("target_logprobs")
        return engines.Targets(*map(np.zeros, (len(ids) - 1, (len(ids) - 1, 0), (len(ids) - 1, 0))))

    def processes(self) -> set[int]:
        self.fail("processes")
        return {1}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(engines, "module", lambda name: SimpleNamespace(Engine=Broken))
    return lambda **errors: engines.load("broken", ARTIFACT, "cpu", 1, **errors)


@pytest.mark.parametrize("where", ["load", "decode", "logits", "target_logprobs", "processes"])
def test_library_errors_name_artifact_and_place(load: Callable[..., Any], where: str) -> None:
    came = []
    with pytest.raises(UserError) as caught:
        engine = load(**{where: RuntimeError("\n\n  sizes 41 and 40\ndo not match\n")})
        inputs = {"decode": ([[1]], 2), "processes": ()}.get(where, ([1],))
        came.extend(getattr(engine, where)(*inputs))
    place = f"{Path(__file__).name} line {Broken.fail.__code__.co_firstlineno + 5}"
    assert str(caught.value) == f"{ARTIFACT}: broken fails on it (RuntimeError: sizes 41 and 40; {place})"
    assert caught.value.__cause__ is None


def test_our_own_errors_keep_their_cause(load: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"broken fails on it \(ZeroDivisionError: .*; __init__\.py line") as caught:
        list(load(logits=lambda: engines.chunk_positions(0)).logits([1]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "error", [UserError("as it is"), engines.CannotDecode("so"), OSError(28, "full"), MemoryError()]
)
def test_what_is_a_line_already_stays_it(load: Callable[..., Any], error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        list(load(decode=error).decode([[1]], 2))
    assert caught.value is error


def test_an_engine_that_works_is_as_it_was(load: Callable[..., Any]) -> None:
    engine = load()
    assert list(engine.decode([[1]], 2)) == [(0, 7, 0.0), (0, 8, 1.0)]
    assert [chunk.shape for chunk in engine.logits([1, 2])] == [(2, 3)]
    assert engine.processes() == {1}
    assert engine.weight_bytes() is None
    engine.mode = "other"
    assert engine.mode == "other"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1.0}, "engine fake: unknown option 'steps'; did you mean 'step'?"),
        ({"quite": 1.0}, "engine fake: unknown option 'quite'; known: any, size, step"),
        ({"step": "fast"}, "engine fake: option step is 'fast'; it must be of type float"),
        ({"step": True}, "engine fake: option step is True; it must be of type float"),
        ({"size": True}, "engine fake: option size is True; it must be of type int"),
    ],
)
def test_unknown_options_are_one_line(options: dict[str, Any], message: str) -> None:
    class Fake(engines.Engine):
        """An engine of three options."""

        def __init__(
            self, artifact: Path, device: str, threads: int, step: float = 0.0, size: int | None = None, any: Any = None
        ) -> None: ...

    Fake.name = "fake"
    engines.check_options(Fake, {"step": 1.0, "size": 1, "any": True})
    with pytest.raises(UserError) as caught:
        engines.check_options(Fake, options)
    assert str(caught.value) == message


def test_an_engine_is_a_module_or_package() -> None:
    assert engines.module("llama-server").__name__ == "quantmill.engines.llama_server"
    kind = engines.find("llama-server")
    assert (kind.name, kind.__module__) == ("llama-server", "quantmill.engines.llama_server")
    with pytest.raises(UserError, match=r"'foo-int': there is no scripts/.*/foo_int.py, and no package foo-int$"):
        engines.module("foo-int")


def test_a_runs_variables_are_set_before_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QM_TEST", "of the shell")  # and put back afterwards
    seen = []

    def module(name: str) -> SimpleNamespace:
        seen.append(os.environ["QM_TEST"])
        return SimpleNamespace(Engine=Broken)

    monkeypatch.setattr(engines, "module", module)
    engine = engines.load("broken", ARTIFACT, "cpu", 1, environment={"QM_TEST": "of the run"}, load=None)
    assert seen == ["of the run"]
    assert engine.environment == {"QM_TEST": "of the run"}
    assert "environment" not in engine.errors


@pytest.mark.parametrize("environment", [1, {"QM_TEST": 1}, {"QM_TEST": "a\0b"}, {"A=B": "1"}])
def test_what_is_no_environment_is_one_line(load: Callable[..., Any], environment: Any) -> None:
    with pytest.raises(UserError, match=f"^{ARTIFACT}"):
        load(environment=environment)


def test_an_engine_of_one_card_takes_no_more(load: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="engine broken runs on one GPU, and 2 are asked for"):
        load(gpus=2)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "is not a mapping")])
def test_options_of_a_command_line_are_a_mapping(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        engines.parse_options(text)


def raise_from() -> None:
    try:
        fault()
    except KeyError as error:
        raise UserError("a line") from error


def fault() -> None:
    raise KeyError("x\ny")


def run_out_of_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("main", "line", "traced"),
    [
        (raise_from, "error: a line", True),
        (fault, r"error: a bug in this program: KeyError: 'x\ny'", True),
        (run_out_of_memory, "error: memory ran out, and nothing was written", False),
    ],
)
def test_a_program_ends_with_one_line_below_the_traceback(
    main: Callable[[], None],
    line: str,
    traced: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # which `run` sets for all that it starts; after this test nobody has it
    with pytest.raises(SystemExit) as caught:
        program.run(main)
    assert str(caught.value.code).startswith(line)
    assert str(caught.value.code).isprintable()
    assert ("Traceback" in capsys.readouterr().err) == traced


def test_a_librarys_heading_takes_the_line_below_it_along() -> None:
    assert program.first_line(ValueError("\nField 'x':\n    expected int\n")) == "Field 'x': expected int"
    assert program.first_line(ValueError("a: b\nc")) == "a: b"
    assert program.first_line(ValueError("alone:")) == "alone:"


@pytest.mark.parametrize(
    ("hasty", "end", "code", "said"),
    [
        (True, "pass", 0, ""),
        (True, "raise program.UserError('too short')", 1, "error: too short\n"),
        (True, "sys.exit(3)", 3, ""),
        (False, "pass", -signal.SIGABRT, ""),
    ],
)
def test_an_abort_at_the_end_loses_no_result(hasty: bool, end: str, code: int, said: str, tmp_path: Path) -> None:
    """A published result stays a success, and a failure its line; Python's exit handlers still run."""
    lines = (
        "import atexit, ctypes, sys",
        "from quantmill.common import program",
        "atexit.register(lambda: print('good-bye'))",
        "libc = ctypes.CDLL(None)",
        "libc.__cxa_atexit(libc.abort, None, None)",
        "def main():",
        "    print('published')",
        f"    {hasty} and program.leave_at_once()",
        f"    {end}",
        "program.run(main)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    paths = {"PYTHONPATH": str(REPO / "scripts")}
    result = subprocess.run(command, env=os.environ | paths, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == code
    assert result.stdout.split() == ["published", "good-bye"]
    assert result.stderr == said
