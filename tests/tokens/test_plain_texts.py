"""Texts of other systems: marks and line ends change no token, and an invalid text is one line."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from quantmill.plan.config import ConfigError, check_text
from quantmill.tokens import plain_text

TEXT = "The first line.\n\nThe sécond, and more words.\nThe third.\n"
SAME = {  # as other systems save it
    "lf": TEXT.encode(),
    "crlf": TEXT.replace("\n", "\r\n").encode(),
    "cr": TEXT.replace("\n", "\r").encode(),
    "bom": b"\xef\xbb\xbf" + TEXT.encode(),
    "bom and crlf": b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode(),
}
KINDS = ("prompts", "evaluation", "document")
BREAKS = "one \x0b line \x0c with \x85 other \u2028 breaks \u2029 in \x1c it"
NO_TEXTS = {
    "utf-16": (TEXT.encode("utf-16"), "is not UTF-8 at byte 0; save it as UTF-8"),
    "utf-16 without a mark": ("abc\n".encode("utf-16-le"), "has a NUL at byte 1, in line 1; remove it"),
    "a NUL": ("é\r\nb\r\nc\0d".encode(), "has a NUL at byte 8, in line 3; remove it"),
    "white space": (" \t\r\n\u2028\u3000\x0c\n".encode(), "is empty; put a text in it"),
    "a mark alone": (b"\xef\xbb\xbf\r\n", "is empty; put a text in it"),
    "empty lines": (b"\n\n\r\n\r", "is empty; put a text in it"),
    "nothing": (b"", "is empty; put a text in it"),
    "latin-1": ("dé".encode("latin-1"), "is not UTF-8 at byte 1; save it"),
    "half a surrogate pair": (b"a\xed\xa0\x80", "is not UTF-8 at byte 1; save it"),
}
TEMPLATE = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
NOTHING_LEFT = {"type": "Replace", "pattern": {"Regex": "[x\\n]+"}, "content": ""}


@pytest.mark.parametrize("name", SAME)
def test_marks_and_line_ends_are_normalised(tmp_path: Path, name: str) -> None:
    (tmp_path / "t").write_bytes(SAME[name])
    assert plain_text.read(tmp_path / "t") == TEXT


@pytest.mark.parametrize("name", NO_TEXTS)
def test_a_config_with_an_invalid_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "t").write_bytes(NO_TEXTS[name][0])
    with pytest.raises(ConfigError) as caught:
        check_text("texts.prompts", tmp_path / "t")
    assert str(caught.value).startswith(f"texts.prompts: {tmp_path / 't'} {NO_TEXTS[name][1]}")


def tokenizer_with(change: dict[str, Any]) -> str:
    return json.dumps(json.loads((REPO / "demo/tokenizer.json").read_text()) | change)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, torch_python: Path) -> dict[str, dict[str, Any]]:
    """Model, text and kind -> how tokens.tokenize_texts ended, and what it wrote."""
    folder = tmp_path_factory.mktemp("texts")
    special = {"<s>": {"id": "<s>", "ids": [99999], "tokens": ["<s>"]}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    beyond = {"type": "TemplateProcessing", "single": TEMPLATE, "pair": pair, "special_tokens": special}
    named = json.loads((REPO / "demo/tokenizer_config.json").read_text()) | {"bos_token": "<zz>", "eos_token": "<yy>"}
    models = {
        "plain": {},
        "bos beyond": {"tokenizer.json": tokenizer_with({"post_processor": beyond})},
        "names beyond": {"tokenizer_config.json": json.dumps(named)},
        "names beyond, and none added": {
            "tokenizer.json": tokenizer_with({"post_processor": None}),
            "tokenizer_config.json": json.dumps(named),
        },
        "nothing left": {"tokenizer.json": tokenizer_with({"normalizer": NOTHING_LEFT, "post_processor": None})},
        "size": {"config.json": json.dumps(json.loads((REPO / "demo/config.json").read_text()) | {"vocab_size": -3})},
    }
    for name, files in models.items():
        (folder / name).mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_text(files.get(file) or (REPO / "demo" / file).read_text())
        (folder / name / "quantmill.json").write_text('{"source": {}}')
    (folder / "breaks").write_text(f"{BREAKS}\nand one more\n", encoding="utf-8", newline="")
    (folder / "x").write_text("xxx\n")
    for name, data in SAME.items() | {(name, data) for name, (data, _) in NO_TEXTS.items()}:
        (folder / f"text of {name}").write_bytes(data)
    runs = [("plain", f"text of {name}", kind) for name in [*SAME, *NO_TEXTS] for kind in KINDS]
    runs += [(model, "text of lf", "evaluation") for model in list(models)[1:]]
    runs += [("plain", "breaks", "prompts"), ("nothing left", "x", "prompts"), ("nothing left", "x", "evaluation")]
    commands = [
        [*(str(folder / part) for part in (model, text, f"{number}.json")), "--as", kind]
        for number, (model, text, kind) in enumerate(runs)
    ]
    command = [torch_python, REPO / "tests/helpers/in_one_process.py", "tokens.tokenize_texts"]
    result = subprocess.run([*map(str, command)], input=json.dumps(commands), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = {}
    for number, (run, line) in enumerate(zip(runs, result.stdout.splitlines(), strict=True)):
        out = folder / f"{number}.json"
        written = json.loads(out.read_text()) if out.exists() else None
        found[" ".join(run)] = json.loads(line) | {"written": written}
    return found


def test_no_run_ends_with_a_traceback(outcomes: dict[str, Any]) -> None:
    assert not [run for run, found in outcomes.items() if "Traceback" in found["printed"]]


@pytest.mark.parametrize("kind", KINDS)
def test_marks_and_line_ends_change_no_token(outcomes: dict[str, Any], kind: str) -> None:
    plain, *others = (outcomes[f"plain text of {name} {kind}"]["written"] for name in SAME)
    assert others == [plain] * len(others)
    if kind == "prompts":
        assert [prompt["text"] for prompt in plain["prompts"]] == [line for line in TEXT.split("\n") if line]
    else:
        assert plain["bytes"] == len(TEXT.encode())


def test_prompts_end_at_newlines_alone(outcomes: dict[str, Any]) -> None:
    prompts = outcomes["plain breaks prompts"]["written"]["prompts"]
    assert [prompt["text"] for prompt in prompts] == [BREAKS, "and one more"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NO_TEXTS)
def test_the_program_refuses_invalid_texts(outcomes: dict[str, Any], name: str, kind: str) -> None:
    found = outcomes[f"plain text of {name} {kind}"]
    assert f"text of {name}: {NO_TEXTS[name][1]}" in found["end"]
    assert found["written"] is None


def test_a_bos_beyond_the_vocabulary(outcomes: dict[str, Any]) -> None:
    end = outcomes["bos beyond text of lf evaluation"]["end"]
    assert "its tokenizer makes token 99999, but the model has 2048" in end


def test_tokenizer_json_decides_the_first_token(outcomes: dict[str, Any]) -> None:
    found = outcomes["names beyond text of lf evaluation"]
    assert found["written"]["ids"][0] == found["written"]["bos_id"] == found["written"]["prefix_id"] == 0


def test_a_prefix_beyond_the_vocabulary_is_none(outcomes: dict[str, Any]) -> None:
    found = outcomes["names beyond, and none added text of lf evaluation"]
    assert found["end"] is None
    assert "note: the token before documents, 2048, is beyond the vocabulary" in found["printed"]
    assert found["written"]["prefix_id"] is found["written"]["bos_id"] is None
    assert outcomes["plain text of lf evaluation"]["written"]["prefix_id"] == 0


def test_a_vocabulary_of_no_size(outcomes: dict[str, Any]) -> None:
    assert "vocab_size is -3, not a number of tokens" in outcomes["size text of lf evaluation"]["end"]


@pytest.mark.parametrize("kind", ["prompts", "evaluation"])
def test_a_text_of_which_no_token_is_left(outcomes: dict[str, Any], kind: str) -> None:
    assert "its tokenizer makes no token of 'xxx" in outcomes[f"nothing left x {kind}"]["end"]
