"""A user's task may name data of the study's folder or the hub, and YAML files of its own folder."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, interpreter

# Asks `documents.check_question` in the folder that Snakemake would run in; a line of JSON for each question.
QUESTIONS = f"""
import json, sys
sys.path.insert(0, {str(REPO / "scripts")!r})
from quantmill.common.program import UserError
from quantmill.tasks import documents
for path, name, words in json.load(sys.stdin):
    try:
        print(json.dumps(documents.check_question(path, name, words)))
    except UserError as error:
        print(json.dumps(str(error)))
"""
# Asks `own_tasks.check` of each folder.
FOLDERS = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(REPO / "scripts")!r})
from quantmill.common.program import UserError
from quantmill.tasks import own_tasks
for folder in sys.argv[1:]:
    try:
        print(json.dumps(own_tasks.check(Path(folder))))
    except UserError as error:
        print(json.dumps(str(error)))
"""
ADDRESS = "is an address"
OUTSIDE = "is outside of the folder that Snakemake runs in"
NOT_OF_THE_HUB = "is not a data set of the hub"


def files(*names: str, **words: Any) -> list[Any]:
    return ["json", None, {"data_files": {"test": list(names)}, **words}]


ASKED = [
    (files("mine/rows.jsonl"), None),
    (["text", None, {"data_files": "mine/rows.jsonl", "split": "train"}], None),
    (["csv", None, {"data_files": ["mine/rows.jsonl"], "delimiter": ";", "header": None, "column_names": ["a"]}], None),
    (["acme/set", "part", {"data_files": "data/*.parquet", "data_dir": "data", "revision": "main"}], None),
    (files("mine/rows.jsonl", cache_dir="x"), "dataset_kwargs.cache_dir is not passed on"),
    (files("mine/rows.jsonl", token="x"), "dataset_kwargs.token is not passed on"),
    (files("mine/rows.jsonl", download_config={}), "dataset_kwargs.download_config is not passed on"),
    (files("mine/rows.jsonl", storage_options={}), "dataset_kwargs.storage_options is not passed on"),
    (files("mine/rows.jsonl", num_proc=999), "dataset_kwargs.num_proc is not passed on"),
    (files("mine/rows.jsonl", data_dir="/etc"), "wants data_files"),
    (["text", None, {}], "wants data_files"),
    (["text", None, {"data_files": []}], "wants data_files"),
    (["text", None, {"data_files": 5}], "names no files"),
    (files("/etc/passwd"), OUTSIDE),
    (files("../secret.jsonl"), OUTSIDE),
    (files("mine/link.jsonl"), OUTSIDE),
    (files("linked/secret.jsonl"), OUTSIDE),
    (files("mine/*.jsonl"), "is a pattern"),
    (files("mine/ro[w]s.jsonl"), "is a pattern"),
    (files("~/rows.jsonl"), "is not there"),
    (files("mine"), "is not there"),
    (files("mine/pipe.jsonl"), "is not there"),
    (files("https://example.org/rows.jsonl"), ADDRESS),
    (files("hf://datasets/acme/set/rows.jsonl"), ADDRESS),
    (files("zip://rows.jsonl::mine/rows.zip"), ADDRESS),
    (["mine", None, {}], NOT_OF_THE_HUB),
    (["/etc", None, {}], NOT_OF_THE_HUB),
    (["../other", None, {}], NOT_OF_THE_HUB),
    (["pandas", None, {"data_files": "mine/rows.jsonl"}], NOT_OF_THE_HUB),
    (["s3://bucket/set", None, {}], NOT_OF_THE_HUB),
    (["acme/set", None, {"data_files": "/etc/passwd"}], "is not a file of that repository"),
    (["acme/set", None, {"data_files": {"test": ["a", "../../etc/passwd"]}}], "is not a file of that repository"),
    (["acme/set", None, {"data_dir": "~/mine"}], "is not a file of that repository"),
    (["acme/set", None, {"data_files": "hf://datasets/x/y"}], "is not a file of that repository"),
    ([5, None, {}], "is not a data set's name"),
    (["acme/set", ["a"], {}], "is not a data set's name"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    study = tmp_path_factory.mktemp("parent") / "study"
    (study / "mine").mkdir(parents=True)
    (study / "mine/rows.jsonl").write_text('{"a": 1}\n')
    (study.parent / "secret.jsonl").write_text('{"a": 1}\n')
    (study / "mine/link.jsonl").symlink_to(study.parent / "secret.jsonl")
    (study / "linked").symlink_to(study.parent)
    os.mkfifo(study / "mine/pipe.jsonl")
    asked = json.dumps([question for question, _ in ASKED])
    command = [interpreter("lm-eval"), "-c", QUESTIONS]
    result = subprocess.run(command, cwd=study, input=asked, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(ASKED)), ids=[json.dumps(question) for question, _ in ASKED])
def test_a_task_reads_study_or_hub_files(answers: list[str | None], number: int) -> None:
    said, expected = answers[number], ASKED[number][1]
    assert said is None if expected is None else expected in said, said


def bomb(levels: int) -> str:
    """YAML whose aliases make 10 ** levels values."""
    lines = ["a0: &a0 x"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return "\n".join(lines) + "\n"


def test_a_task_file_stays_in_its_folder(tmp_path: Path, call: Callable) -> None:
    (tmp_path / "outside.yaml").write_text("task: outside\n")
    contents = {
        "good": ("include: base.yaml\ntask: mine\n", None),
        "own": (f"include: {interpreter('lm-eval').parents[1]}/nowhere.yaml\n", "outside of tasks.include"),
        "above": ("include: [base.yaml, ../outside.yaml]\n", "outside of tasks.include"),
        "absolute": ("include: /etc/hostname\n", "outside of tasks.include"),
        "gone": ("include: gone.yaml\n", "is not there"),
        "number": ("include: 5\n", "not the name of a file"),
        "prompt": ("task: mine\nuse_prompt: /etc/x.yaml:a\n", "use_prompt names prompts of another file"),
        "nested": ("group: g\ntask: [{task: mine, use_prompt: 'x.yaml:a'}]\n", "use_prompt names prompts"),
        "aliases": (bomb(12), "more than 100000 values"),
        "large": ("# " + "x" * 5_000_000, "not a plain file of at most 4 MiB"),
        "deep": ("a: " + "[" * 100_000, "nests more than 50 values"),
        "not YAML": ("a: [b\nc: {", None),  # no task is made of it
    }
    for name, (text, _) in contents.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "base.yaml").write_text("output_type: multiple_choice\n")
        (folder / "mine.yaml").write_text(text)
    for name in ("pipe", "linked"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe/mine.yaml")
    (tmp_path / "linked/mine.yaml").symlink_to(tmp_path / "outside.yaml")
    expected = {name: said for name, (_, said) in contents.items()}
    expected |= {"pipe": "not a plain file", "linked": "outside of tasks.include"}
    result = call(interpreter("lm-eval"), "-c", FOLDERS, *(tmp_path / name for name in expected))
    assert result.returncode == 0, result.stderr
    said = dict(zip(expected, map(json.loads, result.stdout.splitlines()), strict=True))
    for name, line in expected.items():
        assert said[name] is None if line is None else line in said[name], (name, said[name])
