"""scripts/quantmill/report/collect.py: many studies in one table and on one page, and what of them is compared."""

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from hub_server import Repository, serve
from program_fixtures import Program, Result
from published_study import TOKEN, Study

from quantmill.common.program import UserError
from quantmill.report import merge_studies, summary, tasks
from quantmill.report.labels import label

READ = """
import json, sys
from pyarrow import parquet
table = parquet.read_table(sys.argv[1])
text = table.schema.field("measured_alike").metadata[b"description"].decode()
print(json.dumps({"rows": table.to_pylist(), "text": text}))
"""
# the pages are read for their rows; real pictures are drawn in test_picture.py
WITHOUT_DRAWING = """
from quantmill.report import drawing
drawing.draw = lambda rows: drawing.Drawing(svg="<svg/>", sizes="<svg/>", png=b"")
"""
Results = dict[str, Any]
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def recorded() -> Results:
    return json.loads((REPO / "results/demo/results.json").read_text())


@pytest.fixture
def collect(tmp_path: Path, run_program: Program) -> Callable[..., Result]:
    """Run the program in a folder, without a hub unless `endpoint` is one."""

    def run(*studies: object, endpoint: str = "http://127.0.0.1:9", **more: str) -> Result:
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
        words = {"before": WITHOUT_DRAWING, "folder": tmp_path, "environment": environment | more}
        return run_program("report.collect", *studies, "--out", "out", **words)

    return run


def part(content: Results, *formats: str) -> Results:
    """Return the rows of these formats as a study of their own."""
    return copy.deepcopy(content | {"rows": [row for row in content["rows"] if row["format"] in formats]})


def rows(merged: Results) -> dict[str, dict[str, Any]]:
    """Return the rows by label; of several with one label the last."""
    return {label(row): row for row in merged["rows"]}


def test_rows_measured_alike_are_compared(recorded: Results) -> None:
    studies = {"a": part(recorded, "fp16", "ct2-int8", "mlc-q4f16_1"), "b": part(recorded, "ct2-float16", "gptq-int4")}
    merged, origins = merge_studies.merge(studies)
    assert origins == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    found, before = rows(merged), {row["format"]: row for row in recorded["rows"]}
    assert list(merged["config"]["models"]) == ["demo"]
    assert sorted(found["gptq-int4"]["dominated_by"]) == ["ct2-float16", "ct2-int8", "fp16"]
    for name in ("perplexity_ratio", "nll_difference", "nll_verdict", "pareto"):
        assert {format: row[name] for format, row in found.items()} == {
            format: before[format][name] for format in found
        }


def another_text(row: dict[str, Any]) -> None:
    row["protocol"]["quality"]["text_sha256"] = "f" * 64


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.update(device="Another CPU"),
        lambda row: row["protocol"]["latency"].update(new_tokens=100),
        lambda row: row["protocol"]["latency"].update(prompts_sha256="0"),
        lambda row: row["protocol"]["quality"].update(perplexity="llamacpp-512"),
        another_text,
        lambda row: row["artifact"]["source"].update(sha256={"model.safetensors": "0"}),
    ],
    ids=["device", "new tokens", "prompts", "protocol", "text", "weights"],
)
def test_no_verdict_reaches_rows_that_were_measured_otherwise(recorded: Results, change: Change) -> None:
    slow, fast = part(recorded, "fp16", "gptq-int4"), part(recorded, "ct2-int8", "fp16")
    for row in fast["rows"]:
        change(row)
    merged, _ = merge_studies.merge({"slow": slow, "fast": fast})
    sections = {name: [row for row in merged["rows"] if row["model"] == name] for name in merged["config"]["models"]}
    assert [[row["format"] for row in each] for each in sections.values()] == [
        ["fp16", "gptq-int4"],
        ["fp16", "ct2-int8"],
    ]
    names = list(sections)
    assert names[0] != names[1]
    assert sections[names[0]][1]["dominated_by"] == ["fp16"]  # and not ct2-int8, which is six times as fast
    assert "ct2-int8" not in summary.verdict(sections[names[0]], "fp16")
    assert sections[names[0]][0]["pareto"] is True


def test_a_row_without_a_speed_stays_with_its_study(recorded: Results) -> None:
    for name in ("device", "latency_summary", "device_details", "tokens_per_second"):
        recorded["rows"][1][name] = None
        recorded["rows"][1]["missing"][name] = "failed: no memory"
    recorded["rows"][1]["protocol"]["latency"] = None
    merged, _ = merge_studies.merge({"a": recorded})
    assert list(merged["config"]["models"]) == ["demo"]


def test_equal_names_are_distinguished_and_shared_rows_appear_once(recorded: Results) -> None:
    again = part(recorded, "fp16", "ct2-int8")
    again["rows"][1]["latency_summary"] |= {"tokens_per_second": 1.0}
    merged, origins = merge_studies.merge({"a": part(recorded, "fp16", "ct2-int8"), "b": again})
    assert [label(row) for row in merged["rows"]] == ["fp16", "ct2-int8", "ct2-int8@b"]
    assert origins[-1] == ("b", 1)


def test_tasks_of_all_studies_stay_with_their_rows(recorded: Results) -> None:
    """Paired figures of a study whose reference is not the section's are left out, with the reason."""
    one, other = part(recorded, "fp16", "ct2-int8"), part(recorded, "fp16", "ct2-int8", "gptq-int4")
    other["rows"][1]["latency_summary"] |= {"tokens_per_second": 1.0}
    paired = dict.fromkeys(tasks.PAIRED, 0.25)
    for content, score in ((one, 0.5), (other, 0.75)):
        names = [{name: row[name] for name in ("model", "format", "run")} for row in content["rows"]]
        words = {"task": "own", "metric": "acc", "score": score, "higher_is_better": True, "share": True}
        more = dict.fromkeys(("stderr", "documents", "metrics", "of")) | paired
        content["tasks"] = [name | words | more | {"missing": {}} for name in names]
    merged, _ = merge_studies.merge({"a": one, "b": other})
    _, wide = tasks.widen(merged)
    found = {label(row): row for row in wide}
    scores = {name: (row["task_own_score"], row["task_own_flips"]) for name, row in found.items()}
    assert scores == {
        "fp16": (0.5, 0.25),
        "ct2-int8": (0.5, 0.25),
        "ct2-int8@b": (0.75, None),
        "gptq-int4": (0.75, None),
    }
    assert found["gptq-int4"]["missing"]["task_own_flips"] == "it was compared with the reference of its own study"


def test_studies_that_compare_with_different_references_are_refused(recorded: Results) -> None:
    other = part(recorded, "fp16")
    other["config"]["reference"] = "ct2-float16"
    with pytest.raises(UserError, match=r"different references \(fp16 in a, ct2-float16 in b\)"):
        merge_studies.merge({"a": recorded, "b": other})


def test_files_folders_and_cards_make_one_page(
    recorded: Results, tmp_path: Path, tools_python: Path, collect: Callable[..., Result]
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/results.json").write_text(json.dumps(part(recorded, "fp16")))
    (tmp_path / "two").mkdir()
    (tmp_path / "two/README.md").write_text("# A card\n")
    (tmp_path / "two/results.json").write_text(json.dumps(part(recorded, "ct2-int8")))
    elsewhere = part(recorded, "gptq-int4")
    elsewhere["rows"][0]["device"] = "</script>Another CPU"
    with serve() as hub:
        content = {"results.json": json.dumps(elsewhere).encode(), "quantmill.json": b"{}"}
        hub.repositories["models/acme/demo-gptq"] = Repository(content)
        hub.repositories["models/acme/other"] = Repository({"config.json": b"{}"})
        result = collect("one", "two/README.md", "acme/demo-gptq", endpoint=hub.endpoint)
        assert result.returncode == 0, result.stderr
        refused = collect("acme/other", endpoint=hub.endpoint)
    assert refused.stderr == (
        "error: acme/other: holds no results.json, so Quantmill did not publish it; name another\n"
    )
    read = subprocess.run(
        [tools_python, "-c", READ, tmp_path / "out/collected.parquet"], capture_output=True, text=True, check=True
    )
    found = json.loads(read.stdout)
    told = [(row["study"], row["format"], row["tokens_per_second"]) for row in found["rows"]]
    speeds = {row["format"]: row["tokens_per_second"] for row in recorded["rows"]}
    names = {"fp16": "one", "ct2-int8": "two", "gptq-int4": "acme/demo-gptq"}
    assert told == [(study, format, speeds[format]) for format, study in names.items()]
    alike = [row["measured_alike"] for row in found["rows"]]
    assert alike[0] == alike[1] != alike[2]
    assert "others cannot be compared" in found["text"]
    assert [row["model"] for row in found["rows"]] == ["demo"] * 3
    text = (tmp_path / "out/collected.html").read_text()
    assert all(json.dumps(name)[1:-1].replace("<", "\\u003c") in text for name in alike)
    assert "</script>Another" not in text
    assert '"resume":""' in text  # no command goes on with several studies


def test_what_was_published_is_collected_from_the_hub(
    recorded: Results, tmp_path: Path, tools_python: Path, run_program: Program, collect: Callable[..., Result]
) -> None:
    with serve() as hub:
        hub.storage.writers = {TOKEN}
        study = Study(tmp_path / "study", hub, tools_python, run_program)
        for name in ("ct2-int8", "gptq-int4"):
            result = study.push(name, repository=f"acme/{name}")
            assert result.returncode == 0, result.stderr
        names = ("acme/ct2-int8", "acme/gptq-int4", REPO / "results/demo")
        result = collect(*names, endpoint=hub.endpoint, HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stderr
    read = [tools_python, "-c", READ, tmp_path / "out/collected.parquet"]
    found = json.loads(subprocess.run(read, capture_output=True, text=True, check=True).stdout)["rows"]
    assert [(row["study"], row["format"]) for row in found] == [
        ("acme/ct2-int8", "ct2-int8"),
        ("acme/gptq-int4", "gptq-int4"),
        *(("demo", row["format"]) for row in recorded["rows"] if row["format"] not in ("ct2-int8", "gptq-int4")),
    ]
    assert {row["measured_alike"] for row in found} == {"demo"}  # by whomever, all are of one text and device


@pytest.mark.parametrize("name", ["nowhere", "empty", "a/b/c", "-"])
def test_other_files_are_refused(tmp_path: Path, collect: Callable[..., Result], name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = collect(name)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {name}: holds no results.json; name one, a folder with one, or")
    assert not (tmp_path / "out").exists()
