"""Tasks of lm-evaluation-harness through our engines, beside its own model `hf`, on local data alone."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO, interpreter
from hub_server import Repository, serve
from program_fixtures import Program, Result, forks

TASKS = "tests/data/tasks"
NAMES = ["endings", "letters", "last_words", "pages", "next_words"]
ALL = [*NAMES, "sentences"]
Call = Callable[..., subprocess.CompletedProcess[str]]

FLOAT32 = json.dumps({"quantization": "float32"})


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Run a program of envs/lm-eval without a hub, in a fork of a process that has imported the harness."""
    home = {"HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1"}
    modules = "quantmill.tasks.fetch_documents", "quantmill.tasks.measure"
    with forks(interpreter("lm-eval"), "scripts/quantmill", *modules, **home) as program:
        yield program


def fetch(harness: Program, name: str, out: Path, include: str | Path) -> Result:
    return harness("tasks.fetch_documents", name, out / name, "--include", include)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, call: Call, harness: Program, tools_python: Path, torch_python: Path
) -> Path:
    """Make the demo's fp16 artifact, one of CTranslate2 with the same float32 arithmetic, and all documents."""
    folder = tmp_path_factory.mktemp("tasks")
    steps = [
        (tools_python, "fetch.link", "demo", folder / "source", "--kind", "demo"),
        (tools_python, "checkpoint.to_safetensors", folder / "source", folder / "safetensors"),
        (tools_python, "build.fp16", folder / "safetensors", folder / "fp16"),
        (torch_python, "build.ct2", folder / "safetensors", folder / "ct2-float32", f"--parameters={FLOAT32}"),
    ]
    for python, program, *arguments in steps:
        result = call(python, "scripts/quantmill", program, *arguments)
        assert result.returncode == 0, result.stderr
    for name in ALL:
        result = fetch(harness, name, folder / "documents", TASKS)
        assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def measure(folder: Path, harness: Program, torch_python: Path) -> Callable[..., Result]:
    """Run tasks.measure on an artifact of the folder."""

    def run(artifact: str, engine: str, out: Path, asked: dict[str, Any], *options: object) -> Any:
        return harness(
            *("tasks.measure", folder / artifact, out, "--engine", engine),
            *("--python", torch_python, "--model", folder / "safetensors", "--device", "cpu"),
            *("--tasks", json.dumps(asked), "--documents", *options),
        )

    return run


@pytest.fixture(scope="module")
def run(folder: Path, measure: Callable) -> Callable[..., dict[str, Any]]:
    def tasks(artifact: str, engine: str, out: str, *options: str, names: list[str] = ALL, **words: Any) -> Any:
        asked = {"names": names, "include": TASKS, "metrics": {}} | words
        documents = [folder / "documents" / name for name in names]
        result = measure(artifact, engine, folder / "tasks" / out, asked, *documents, *options)
        assert result.returncode == 0, result.stderr
        return json.loads((folder / "tasks" / out).read_text())

    return tasks


@pytest.fixture(scope="module")
def ours(run: Callable) -> dict[str, Any]:
    return run("fp16", "transformers", "fp16.json", "--texts")


@pytest.fixture(scope="module")
def theirs(folder: Path, call: Call) -> dict[str, Any]:
    """Return the results of lm-evaluation-harness' own model for the same artifact and tasks."""
    out = folder / "hf.json"
    result = call(interpreter("lm-eval"), "tests/tasks/tasks_checks.py", folder / "fp16", TASKS, out, *ALL)
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_fp16_equals_lm_evaluation_harness_own_model(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    mine, figures = ours["tasks"][name], theirs[name]["figures"]
    for metric, (value, stderr) in mine["metrics"].items():
        error = figures[metric.replace(",", "_stderr,")]
        # shares of right answers to the last digit; what follows from log-probabilities as far as float32 sums go
        digits = 0 if metric.startswith(("acc", "exact_match")) else 1e-5
        assert value == pytest.approx(figures[metric], rel=digits, abs=0)
        assert stderr == (None if error == "N/A" else pytest.approx(error, rel=digits, abs=0))
    if name == "sentences":
        return
    part, responses = mine["tasks"][name], theirs[name]["responses"]
    if part["output_type"] == "generate_until":
        assert part["answers"] == [each[0] for each in responses]
        return
    found = [[each if isinstance(each, float) else each[0] for each in document] for document in responses]
    for one, other in zip(part["scores"], found, strict=True):
        assert one == pytest.approx(other, abs=2e-4)
    if part["output_type"] == "multiple_choice":
        assert part["answers"] == [int(np.argmax(each)) for each in found]
    if part["output_type"] == "loglikelihood":
        assert part["answers"] == [int(document[0][1]) for document in responses]


def test_correct_answers_are_the_targets(ours: dict[str, Any]) -> None:
    part = ours["tasks"]["endings"]["tasks"]["endings"]
    rows = [json.loads(line) for line in Path(REPO, TASKS, "endings.jsonl").read_text().splitlines()]
    assert part["ids"] == list(range(len(rows))) and part["documents"] == part["of"] == len(rows)
    right = [int(answer == row["right"]) for answer, row in zip(part["answers"], rows, strict=True)]
    assert part["correct"] == right
    assert ours["tasks"]["endings"]["score"] == sum(right) / len(right)
    assert 0 < sum(right) < len(right)  # neither kind of answer is missing
    assert [each["choices"] for each in part["texts"]] == [row["endings"] for row in rows]


def test_engines_of_equal_arithmetic_answer_alike(ours: dict[str, Any], run: Callable) -> None:
    other = run("ct2-float32", "ctranslate2", "ct2-float32.json")
    for name in ALL:
        for task, part in other["tasks"][name]["tasks"].items():
            mine = ours["tasks"][name]["tasks"][task]
            assert part["documents_sha256"] == mine["documents_sha256"]
            assert part["answers"] == mine["answers"], task
            assert "texts" not in part and "texts" in mine
            for one, another in zip(part["scores"], mine["scores"], strict=True):
                assert one == pytest.approx(another, abs=1e-3)


@pytest.mark.slow
def test_the_chosen_metric_gives_the_answers(ours: dict[str, Any], run: Callable) -> None:
    found = run("fp16", "transformers", "fp16.json", names=["endings"], metrics={"endings": "acc_norm"})
    mine, plain = found["tasks"]["endings"], ours["tasks"]["endings"]
    assert (mine["metric"], plain["metric"]) == ("acc_norm,none", "acc,none")
    assert [mine["score"], mine["stderr"]] == plain["metrics"]["acc_norm,none"]
    rows = [json.loads(line) for line in Path(REPO, TASKS, "endings.jsonl").read_text().splitlines()]
    part = mine["tasks"]["endings"]
    by_length = [
        int(np.argmax([score / len(text) for score, text in zip(scores, row["endings"], strict=True)]))
        for scores, row in zip(part["scores"], rows, strict=True)
    ]
    assert part["answers"] == by_length != plain["tasks"]["endings"]["answers"]


@pytest.mark.slow
def test_a_limit_draws_documents_by_the_seed(run: Callable, folder: Path) -> None:
    few = {"names": ["endings", "last_words"], "limit": 7}
    one = run("fp16", "transformers", "fp16.json", "--seed", "3", **few)
    kept = (folder / "tasks/.fp16.answers.jsonl").read_text()
    other = run("ct2-float32", "ctranslate2", "ct2-float32.json", "--seed", "3", **few)
    again = run("fp16", "transformers", "fp16.json", "--seed", "4", **few)
    drawn = [
        [part["ids"] for task in each["tasks"].values() for part in task["tasks"].values()]
        for each in (one, other, again)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(ids) == 7 and ids == sorted(set(ids)) and ids != list(range(7)) for ids in drawn[0])
    assert one["protocol"]["tasks"]["limit"] == 7
    part = one["tasks"]["endings"]["tasks"]["endings"]
    assert (part["documents"], part["of"]) == (7, 24)
    assert (folder / "tasks/.fp16.answers.jsonl").read_text().startswith(kept[:1000])  # a subset was asked before
    whole = run("fp16", "transformers", "fp16.json", names=["endings"], limit=1000)
    assert whole["tasks"]["endings"]["tasks"]["endings"]["documents"] == 24


def write_task(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)


MINE = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: tests/data/tasks/endings.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{beginning}}"
doc_to_choice: "{{endings}}"
doc_to_target: right
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((), ""),
        (('"{{beginning}}"', "!function evil.text"), "a task there wants to run Python (!function evil.text)"),
        (('"{{beginning}}"', "!function os.getcwd"), "a task there wants to run Python (!function os.getcwd)"),
        (('"{{beginning}}"', "\"{{''.__class__.__mro__[1].__subclasses__()}}\""), "tasks: mine: cannot be loaded (Sec"),
        (("endings.jsonl", "gone.jsonl"), "tests/data/tasks/gone.jsonl: is not there; data_files are relative"),
        (("test_split: test", "test_split: other"), "tasks: mine: cannot be loaded (KeyError: 'other')"),
        (
            (": json\ndataset_kwargs: {data_files: {test: tests/data/tasks/endings.jsonl}}", ": acme/none"),
            "acme/none: revision main is not in the cache",
        ),
        (("{data_files", "{cache_dir: outside, data_files"), "json: dataset_kwargs.cache_dir is not passed on; use"),
        (
            ('"{{beginning}}"', "\"{{ 'a' }}\"\nuse_prompt: prompts.yaml:mine"),
            "use_prompt names prompts of another file",
        ),
        (
            ("doc_to_target", "metric_list: [{metric: bleurt, hf_evaluate: true}]\ndoc_to_target"),
            "a program on the hub",
        ),
        (("multiple_choice", "generate_until\ngeneration_kwargs: {do_sample: true}"), "tasks: mine wants samples"),
        (("task: mine", "task: another"), "has no task 'mine'"),
        (("task: mine", "group: mine\ntask: [endings]"), "tasks: mine has no figure for all its tasks; name those"),
    ],
)
@pytest.mark.slow
def test_a_users_task_runs_no_code(tmp_path: Path, harness: Program, change: tuple[str, str], said: str) -> None:
    mine = tmp_path / "own"
    write_task(mine, "mine", MINE.replace(*change) if change else MINE)
    (mine / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ntext = str\n")
    result = fetch(harness, "mine", tmp_path / "out", mine)
    assert not (tmp_path / "ran").exists()
    if not said:
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 1, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and said in last
    assert not (tmp_path / "out/mine").exists()


def test_an_unknown_task_names_the_nearest(tmp_path: Path, call: Call) -> None:
    write_task(tmp_path / "own", "mine", MINE)
    result = call(interpreter("lm-eval"), "-c", UNKNOWN, tmp_path / "own")
    assert result.stdout.splitlines()[-1].endswith("has no task 'mien'; did you mean 'mine'?"), result.stderr


# without the thousands of lm-evaluation-harness' own, which take half a minute to read
UNKNOWN = """
import sys
sys.path.insert(0, "scripts")
from pathlib import Path
from quantmill.common.program import UserError
from quantmill.tasks import harness
try:
    harness.load("mien", Path(sys.argv[1]), [Path(sys.argv[1], "mine.yaml")])
except UserError as error:
    print(error)
"""


def test_missing_documents_are_not_downloaded(folder: Path, measure: Callable, tmp_path: Path) -> None:
    shutil.copytree(folder / "documents/endings", tmp_path / "endings")
    for data in tmp_path.glob("endings/*/"):
        shutil.rmtree(data)
    asked = {"names": ["endings"], "include": TASKS}
    result = measure("fp16", "transformers", tmp_path / "out.json", asked, tmp_path / "endings")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: json: is not among the documents of the tasks")
    assert not (tmp_path / "out.json").exists()


HUB = MINE.replace("json\n", "acme/endings\n").replace(
    "dataset_kwargs: {data_files: {test: tests/data/tasks/endings.jsonl}}\n", ""
)


@pytest.mark.slow
def test_hub_data_has_a_commit_and_works_offline(tmp_path: Path, call: Call, measure: Callable) -> None:
    mine, rows = tmp_path / "own", Path(REPO, TASKS, "endings.jsonl").read_bytes()
    write_task(mine, "mine", HUB)
    with serve() as hub:
        hub.repositories["datasets/acme/endings"] = repository = Repository({"test.jsonl": rows})
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        words = ("mine", tmp_path / "out/mine", "--include", mine)
        result = call(interpreter("lm-eval"), "scripts/quantmill", "tasks.fetch_documents", *words, **environment)
        assert result.returncode == 0, result.stderr
        fetched = [path for _, path, _ in hub.log if path.endswith("test.jsonl")]
    assert fetched and all(repository.commit in path for path in fetched)
    facts = json.loads((tmp_path / "out/mine/documents.json").read_text())
    (data,) = facts["data"]
    assert (data["hub"], data["revision"], data["commit"]) == ("acme/endings", "main", repository.commit)
    assert facts["documents"] == {"mine": 24}
    shutil.rmtree(tmp_path / "home")
    asked = {"names": ["mine"], "include": str(mine)}
    result = measure("fp16", "transformers", tmp_path / "fp16.json", asked, tmp_path / "out/mine")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "fp16.json").read_text())
    assert found["data"] == facts["data"]
    assert found["tasks"]["mine"]["tasks"]["mine"]["documents"] == 24
