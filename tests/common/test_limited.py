"""Computations of untrusted tokenizers and templates end within limits, with one line that names the file."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, interpreter

from quantmill.common import limited
from quantmill.common.program import UserError

TEXT = f"The first line, {'a' * 60}!b and more.\n" * 20
TIMES = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a|a|aa)+$"}, "behavior": "Isolated", "invert": False}
PADDING = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
MEMORY, MANY = "ran out of the ", "no real tokenizer does"
# part of tokenizer.json -> what the program says; None where the ids are the demo's own
BOMBS: dict[str, tuple[dict[str, Any], str | None]] = {
    "a text that is multiplied": ({"normalizer": {"type": "Sequence", "normalizers": [TIMES] * 30}}, MEMORY),
    "a text that is multiplied a little": ({"normalizer": {"type": "Sequence", "normalizers": [TIMES] * 3}}, MANY),
    "a long beginning": ({"normalizer": {"type": "Prepend", "prepend": "b" * 30_000_000}}, MEMORY),
    "a catastrophic split": ({"pre_tokenizer": SPLIT}, "retry-limit"),
    "an id of four billion": ({"model": {"vocab": {"the": 4_000_000_000, "The": 3}}}, "error: "),
    "a panic": ({"model": {"continuing_subword_prefix": "x" * 50}}, "its library fails"),
    "ids by lot": ({"model": {"dropout": 0.5}}, "model.dropout"),
    "a token of a long text": (
        {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1_000_000}},
        MEMORY,
    ),
    "padding": ({"padding": {**PADDING, "strategy": {"Fixed": 4_000_000_000}, "pad_to_multiple_of": None}}, None),
    "padding by zero": ({"padding": {**PADDING, "strategy": "BatchLongest", "pad_to_multiple_of": 0}}, None),
}


def run(work: Callable[[], Any], megabytes: int = 200, seconds: int = 1) -> Any:
    """Return the error of `limited.call` for work within limits."""

    def step() -> Any:
        with limited.step("tokenizer.json", megabytes=megabytes, seconds=seconds):
            return work()

    return limited.call(step)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: len("a" * 10**9), "tokenizer.json: ran out of the 200 MB of memory that Quantmill allows"),
        (lambda: 10 ** (10**8), "tokenizer.json: ran out of the 1 s of processor time that Quantmill allows"),
        (lambda: all(True for _ in iter(int, 1)), "tokenizer.json: ran out of the 1 s of processor time"),
    ],
)
def test_memory_and_time_run_out_with_one_line(work: Callable, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(work)


def test_work_that_only_waits_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "PATIENCE", 1)
    with pytest.raises(UserError, match=r"tokenizer\.json: did not finish within the 1 s"):
        run(lambda: time.sleep(600))


def test_a_panic_is_no_exception_and_is_caught() -> None:
    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("index out of range")

    with pytest.raises(UserError, match=r"tokenizer\.json: its library fails \(index out of range\)"):
        run(panic)


def test_each_step_has_its_own_room() -> None:
    def twice() -> list[int]:
        found = []
        for _ in range(2):
            with limited.step("tokenizer.json", megabytes=200, seconds=1):
                found.append(len(bytearray(150 * 2**20)))
        return [*found, len(bytearray(400 * 2**20))]

    assert limited.call(twice) == [150 * 2**20, 150 * 2**20, 400 * 2**20]


def test_a_user_error_and_a_fault_come_through() -> None:
    def user() -> None:
        raise UserError("the file is damaged")

    with pytest.raises(UserError, match="the file is damaged"):
        run(user)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(lambda: 1 // 0)


def test_a_supervised_program_ends_as_its_child_does() -> None:
    start = "import sys; sys.path.insert(0, 'scripts')\nfrom quantmill.common import limited\n"
    start += "from quantmill.common.program import run, UserError\n"
    ends = {
        "print('done')": (0, "done\n", ""),
        "raise UserError('no')": (1, "", "error: no\n"),
        "with limited.step('a template', megabytes=99, seconds=1): 10 ** int(1e8)": (
            *(1, "", "error: a template: ran out of the 1 s of processor time that Quantmill allows\n"),
        ),
    }
    for lines, (code, out, said) in ends.items():
        program = f"{start}def main():\n    limited.supervise()\n    {lines}\nrun(main)"
        result = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True)
        assert (result.returncode, result.stdout, result.stderr) == (code, out, said)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, torch_python: Path) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bombs")
    (folder / "text.txt").write_text(TEXT)
    commands = []
    for name, (changed, _) in {"the demo": ({}, None), **BOMBS}.items():
        model = folder / name
        model.mkdir()
        content = json.loads((REPO / "demo/tokenizer.json").read_text())
        for key, value in changed.items():
            if key == "model":
                content["model"] |= value | {"vocab": content["model"]["vocab"] | value.get("vocab", {})}
            else:
                content[key] = value
        (model / "tokenizer.json").write_text(json.dumps(content))
        for file in ("config.json", "tokenizer_config.json"):
            shutil.copy(REPO / "demo" / file, model)
        (model / "quantmill.json").write_text('{"source": {}}')
        commands.append([*map(str, (model, folder / "text.txt", model / "out.json")), "--as", "document"])
    command = [*map(str, (torch_python, REPO / "tests/helpers/in_one_process.py", "tokens.tokenize_texts"))]
    result = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = {}
    for arguments, line in zip(commands, result.stdout.splitlines(), strict=True):
        model, out = Path(arguments[0]), Path(arguments[2])
        found[model.name] = json.loads(line) | {"written": json.loads(out.read_text()) if out.exists() else None}
    return found


@pytest.mark.parametrize("name", BOMBS)
def test_an_endless_tokenizer_is_one_line_or_none(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    found, said = outcomes[name], BOMBS[name][1]
    if said is None:
        assert found["written"] == outcomes["the demo"]["written"]
        return
    assert said in found["end"]
    assert f"{name}/tokenizer.json" in found["end"] or f"{name}: " in found["end"]
    assert len(found["end"].splitlines()) == 1
    assert not found["printed"]
    assert found["written"] is None


def test_templates_of_tasks_end_within_limits(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "from quantmill.common import limited\n"
        "from quantmill.common.program import UserError\n"
        "from quantmill.tasks import harness\n"
        "from lm_eval import utils\n"
        "harness.RENDERING['seconds'] = 2\n"
        "harness.restrain()\n"
        "for template in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        print(limited.call(lambda: utils.apply_template(template, {'x': 'b' * 40 + '!'})))\n"
        "    except UserError as error:\n"
        "        print(error)\n"
    )
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    templates = {
        "{{ x[:3] }}": "bbb",
        "{{ 'a' * 10**9 }}": "ran out of the 512 MB of memory",
        "{{ x[:1] * 10**10 }}": "ran out of the 512 MB of memory",
        "{{ x[:1] * 10**8 }}": "makes 100,000,000 characters, and 4,194,304 are the most",
        "{{ 10 ** (10 ** 8) }}": "ran out of the 2 s of processor time",
        loop: "ran out of the 2 s of processor time",
        "{{ x | regex_replace('(b+)+c', '') }}": "ran out of the 2 s of processor time",
    }
    command = [interpreter("lm-eval"), program, json.dumps([*templates])]
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env={"PYTHONPATH": str(REPO / "scripts"), "PATH": "/bin"}
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for line, said in zip(lines, templates.values(), strict=True):
        assert said in line
    assert all(line.startswith("tasks: the template ") for line in lines[1:])
