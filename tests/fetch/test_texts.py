"""Texts from data sets of a hub on this machine."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import Repository, lines_of, parquet_of, serve

ROWS = ["", " = Title = \n", "First line, é.\n", "", "Last."]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, tools_python: Path) -> Repository:
    parquet = parquet_of(ROWS, tmp_path_factory.mktemp("rows") / "t.parquet", tools_python)
    return Repository(
        {
            "a/test.parquet": parquet,
            "test.jsonl": lines_of(ROWS),
            "en/c4.json.gz": gzip.compress(lines_of(ROWS)),
            "plain.txt": "".join(ROWS).encode(),
            "bad.parquet": b"PAR1",
            "bad.json.gz": b"not gzip",
            "empty.txt": b" \n",
            "null.jsonl": b'{"text": null}\n',
            "half.jsonl": b'{"text": "\\ud800"}\n',
            "cut.json.gz": gzip.compress(lines_of(ROWS))[:-9],
            "deep.jsonl": b"[" * 100_000,
            "marks.jsonl": b"\xef\xbb\xbf" + lines_of(["\ufeffOne\r\ntwo\r", "\ufeffThree\r"]),
            "long.jsonl.gz": gzip.compress(b"[" + b" " * 2**27),  # of 130 kB
            "nul.jsonl": lines_of(["One", "two\0"]),
        }
    )


@pytest.mark.parametrize(
    ("file", "options", "expected"),
    [
        ("a/test.parquet", [], "\n\n".join(ROWS)),
        ("test.jsonl", ["--join", ""], "".join(ROWS)),
        ("en/c4.json.gz", ["--documents", "3"], "\n\n".join(ROWS[:3])),
        ("plain.txt", [], "".join(ROWS)),
        ("test.jsonl", ["--column", "body"], "has no column 'body'"),
        ("bad.parquet", [], "cannot be read as its name says"),
        ("bad.json.gz", [], "cannot be read as its name says"),
        ("none.txt", [], "holds no file none.txt"),
        ("empty.txt", [], "holds no text"),
        ("null.jsonl", [], "holds something that is not a text"),
        ("half.jsonl", [], "holds something that is not a text"),
        ("cut.json.gz", [], "cannot be read as its name says"),
        ("deep.jsonl", [], "cannot be read as its name says"),
        ("marks.jsonl", ["--join", "\r\n"], "One\ntwo\n\nThree\n"),
        ("nul.jsonl", [], "document 2 of column 'text' has a NUL"),
        (
            "long.jsonl.gz",
            [],
            "cannot be read as its name says (ValueError: a line has more than 67,108,864 characters",
        ),
    ],
)
def test_a_text(
    tmp_path: Path, run_program: Callable, texts: Repository, file: str, options: list, expected: str
) -> None:
    with serve() as hub:
        hub.repositories["datasets/acme/texts"] = texts
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        arguments = ["acme/texts", file, tmp_path / "out", "--revision", "main", *options]
        result = run_program("fetch.text", *arguments, **environment)
    if expected.startswith(("has", "cannot", "holds", "document")):
        assert result.returncode == 1
        assert expected in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "out").exists()
        return
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/text.txt").read_text(encoding="utf-8") == expected
    assert json.loads((tmp_path / "out/quantmill.json").read_text())["source"]["commit"] == texts.commit
    said = json.loads((tmp_path / "out/rows.json").read_text())
    assert sum(said["characters"]) + (len(said["characters"]) - 1) * len(said["join"]) == len(expected)
