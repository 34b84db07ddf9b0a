"""Hostile tokenizers and configs through tokenize_texts.py: one line, no token that no engine has, nobody's Python."""

import json
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
