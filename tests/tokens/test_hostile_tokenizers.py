"""Hostile tokenizers and configs through tokens.tokenize_texts: one line, valid tokens only, and no foreign Python."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

CODE = {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}, "tokenizer_class": None}


# file -> what is changed in it, and what the program says
CASES = {
    "a token beyond the vocabulary": (*("config.json", {"vocab_size": 50}, "but the model has 50; download it again"),),
    **{
        f"a context of {tokens!r}": ("config.json", {"max_position_embeddings": tokens}, "max_position_embeddings")
        for tokens in (-1, 0, 1, 2.5, "x")
    },
    # transformers asks at the terminal whether it may run; a user's `y` does not count
    "a program": ("tokenizer_config.json", CODE, "transformers cannot read its tokenizer"),
    "a model": ("tokenizer_config.json", {"tokenizer_class": "AutoModel"}, "tokenizer"),
    "another tokenizer": ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"}, "tokenizer"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, torch_python: Path) -> dict[str, dict[str, Any]]:
    """Return the end of a run on the demo with each change, in one process whose terminal answers `y`."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text("The first line.\n")
    commands = []
    for case, (changed, change, _) in CASES.items():
        model = folder / case
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            content = json.loads((REPO / "demo" / name).read_text()) | (change if name == changed else {})
            content = {key: value for key, value in content.items() if value is not None}
            (model / name).write_text(json.dumps(content))
        (model / "quantmill.json").write_text('{"schema": 1, "source": {}}')
        (model / "code.py").write_text(f"open({str(model / 'ran')!r}, 'w').close()\n")
        commands.append([*map(str, (model, folder / "text.txt", model / "out.json")), "--as", "document"])
    command = [torch_python, REPO / "tests/helpers/in_one_process.py", "tokens.tokenize_texts"]
    answers = json.dumps(commands) + "\n" + 9 * "y\n"
    result = subprocess.run([*map(str, command)], input=answers, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = map(json.loads, result.stdout.splitlines())
    made = ([(folder / case / name).exists() for name in ("out.json", "ran")] for case in CASES)
    return {case: line | {"made": files} for case, line, files in zip(CASES, lines, made, strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_a_tokenizer_that_is_none_is_one_line(outcomes: dict[str, dict[str, Any]], case: str) -> None:
    said = f"{outcomes[case]['printed']}{outcomes[case]['end']}"
    assert CASES[case][2] in said
    assert len(said.splitlines()) == 1, said
    assert outcomes[case]["made"] == [False, False]  # neither a result, nor what the model's Python leaves


def test_a_conversion_runs_no_program_either(
    tmp_path: Path, tools_python: Path, torch_python: Path, call: Callable
) -> None:
    """And what fp16 is made of names none: gptqmodel would look for it."""
    source = shutil.copytree(REPO / "demo", tmp_path / "source")
    named = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = json.loads((source / "config.json").read_text())
    elsewhere = {"auto_map": named, "attn_implementation": "flash_attention_2"}
    (source / "config.json").write_text(json.dumps(config | elsewhere))
    for program, read, out in (
        ("checkpoint.to_safetensors", "source", "safetensors"),
        ("build.fp16", "safetensors", "fp16"),
    ):
        result = call(tools_python, "scripts/quantmill", program, tmp_path / read, tmp_path / out)
        assert result.returncode == 0, result.stderr
    assert elsewhere.keys().isdisjoint(json.loads((tmp_path / "fp16/config.json").read_text()))

    model = tmp_path / "safetensors"
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text()) | CODE
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in tokenizer.items() if value is not None})
    )
    said = json.loads((model / "quantmill.json").read_text())
    (model / "quantmill.json").write_text(json.dumps(said | {"files": {}}))  # or the hashes would refuse it before
    command = [torch_python, "scripts/quantmill", "build.ct2", model, tmp_path / "ct2"]
    command += ["--parameters", '{"quantization": "int8"}']
    result = subprocess.run([*map(str, command)], cwd=REPO, input="y\ny\ny\n", capture_output=True, text=True)
    assert result.returncode == 1
    assert "CTranslate2 cannot convert it" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "ct2").exists()
