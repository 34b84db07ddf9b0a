"""Hostile tokenizers and configs through tokenize_texts.py: one line, no token that no engine has, nobody's Python."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

CODE = {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}, "tokenizer_class": None}


@pytest.fixture
def tokenized(tmp_path: Path, torch_python: Path) -> Callable[..., str]:
    """The error of a run whose model's files were changed: file=(its content, what replaces it)."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((REPO / "demo" / name).read_text())
    (model / "quantmill.json").write_text('{"schema": 1, "source": {}}')
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "text.txt").write_text("The first line.\n")

    def run(name: str, **changed: object) -> str:
        content = json.loads((model / name).read_text()) | changed
        (model / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
        command = [torch_python, "scripts/tokenize_texts.py", model, tmp_path / "text.txt", tmp_path / "out.json"]
        result = subprocess.run(
            [*map(str, command), "--as", "document"], cwd=REPO, input="y\n", capture_output=True, text=True
        )
        assert result.returncode == 1
        assert not (tmp_path / "out.json").exists()
        assert not (tmp_path / "ran").exists()
        assert len(result.stderr.splitlines()) == 1, result.stderr
        return result.stderr

    return run


def test_a_token_beyond_the_vocabulary(tokenized: Callable[..., str]) -> None:
    assert "and the model has 50; an engine would read what is not there" in tokenized("config.json", vocab_size=50)


@pytest.mark.parametrize("tokens", [-1, 0, 1, 2.5, "x"])
def test_a_context_that_is_none(tokenized: Callable[..., str], tokens: object) -> None:
    assert "max_position_embeddings" in tokenized("config.json", max_position_embeddings=tokens)


def test_a_tokenizer_that_is_a_program(tokenized: Callable[..., str]) -> None:
    """transformers asks at the terminal whether it may run; somebody's `y` there is no answer."""
    assert "transformers cannot read its tokenizer" in tokenized("tokenizer_config.json", **CODE)


@pytest.mark.parametrize("kind", ["AutoModel", "BertTokenizer"])
def test_a_tokenizer_that_is_none(tokenized: Callable[..., str], kind: str) -> None:
    assert "tokenizer" in tokenized("tokenizer_config.json", tokenizer_class=kind)


def test_a_conversion_runs_no_program_either(
    tmp_path: Path, tools_python: Path, torch_python: Path, call: Callable
) -> None:
    """And what fp16 is made of names none: gptqmodel would look for it."""
    source = shutil.copytree(REPO / "demo", tmp_path / "source")
    named = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = json.loads((source / "config.json").read_text())
    elsewhere = {"auto_map": named, "attn_implementation": "flash_attention_2"}
    (source / "config.json").write_text(json.dumps(config | elsewhere))
    for program, read, out in (("bin_to_safetensors", "source", "safetensors"), ("build_fp16", "safetensors", "fp16")):
        result = call(tools_python, f"scripts/{program}.py", tmp_path / read, tmp_path / out)
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
    command = [torch_python, "scripts/build_ct2.py", model, tmp_path / "ct2"]
    result = subprocess.run([*map(str, command)], cwd=REPO, input="y\ny\ny\n", capture_output=True, text=True)
    assert result.returncode == 1
    assert "CTranslate2 cannot convert it" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "ct2").exists()
