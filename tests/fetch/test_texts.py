"""Texts from data sets, and the whole workflow from a hub on this machine."""

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHARACTERS, REPO
from hub_server import Repository, serve

from quantmill.plan.config import TEXTS

ROWS = ["", " = Title = \n", "First line, é.\n", "", "Last."]
WRITE_PARQUET = "import json, sys, pyarrow as a; from pyarrow import parquet\n" + (
    "parquet.write_table(a.table({'text': json.load(sys.stdin)}), sys.argv[1])"
)
TOKEN = "hf_secretsecretsecret"


def parquet_of(rows: list[str], path: Path, tools_python: Path) -> bytes:
    subprocess.run([tools_python, "-c", WRITE_PARQUET, path], input=json.dumps(rows), text=True, check=True)
    return path.read_bytes()


def lines_of(rows: list[str]) -> bytes:
    return "".join(json.dumps({"text": row, "url": "x"}) + "\n" for row in rows).encode()


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


@pytest.mark.slow
def test_the_whole_workflow_from_a_hub(
    checkout: Callable, call: Callable, tmp_path: Path, tools_python: Path, torch_python: Path
) -> None:
    """A gated model, its texts by default from the pinned commits, and a second run without a network."""
    root = checkout()
    _, wikitext = TEXTS["evaluation"]
    rows = [f"{line}\n" for line in (root / "config/evaluation.txt").read_text()[:CHARACTERS].splitlines()]
    study = {
        "models": {"tiny": {"source": {"hub": "acme/tiny", "revision": "v1"}}},
        "formats": ["fp16"],
        "latency": {"new_tokens": 8, "repeats": 1, "processes": 1, "prompt_tokens": []},
        "interpreters": {"tools": str(tools_python), "torch": str(torch_python)},
    }
    (root / "study.yaml").write_text(json.dumps(study))
    snakemake = (REPO / ".venv/bin/snakemake", "--cores", "2", "report", "--configfile", "study.yaml")
    with serve() as hub:
        hub.repositories["models/acme/tiny"] = model = Repository.of(
            REPO / "demo", revisions={"main", "v1"}, gated=True, token=TOKEN
        )
        hub.repositories[f"datasets/{wikitext['hub']}"] = Repository(
            {wikitext["file"]: parquet_of(rows, tmp_path / "t.parquet", tools_python)}, revisions={wikitext["revision"]}
        )
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        result = call(*snakemake, cwd=root, **environment)
        assert result.returncode == 1
        assert "error: acme/tiny: is gated; accept its terms" in result.stdout + result.stderr
        result = call(*snakemake, cwd=root, HF_TOKEN=TOKEN, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        source = json.loads((root / "artifacts/tiny/fp16/quantmill.json").read_text())["source"]
        assert (source["hub"], source["revision"], source["commit"]) == ("acme/tiny", "v1", model.commit)
        assert (root / "artifacts/texts/evaluation/text.txt").read_text() == "\n\n".join(rows)
        assert "acme/tiny" in (root / "artifacts/report/results.json").read_text()
        asked = len(hub.log)
        (root / "artifacts/tiny/source").rename(tmp_path / "source")
        again = [part.replace("report", "artifacts/tiny/source") for part in map(str, snakemake)]
        result = call(*again, cwd=root, **environment | {"HF_HUB_OFFLINE": "1"})
        assert result.returncode == 0, result.stdout + result.stderr
        assert len(hub.log) == asked
    places = (root / "artifacts", root / ".snakemake", tmp_path)
    written = subprocess.run(["grep", "-rl", TOKEN, *places], capture_output=True, text=True, check=False)
    assert written.stdout == ""  # neither a log, a manifest, a command line nor the cache holds the token
    assert any((root / "artifacts/tiny/source").iterdir())
