"""Studies of one's own, each in a fresh copy of the project: other sources, and what bad input leaves."""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import REPO
from workflows import LATENCY, ONE_FORMAT, SHORT, SNAKEMAKE, check_whole, jobs, rows, study

STUDY_OPTIONS = ("--cores", "8", "--configfile", "study.yaml")


@pytest.fixture
def root(checkout: Callable[[], Path], torch_python: Path, tools_python: Path) -> Path:
    """A fresh copy of the project; the environments of this one serve it."""
    return checkout()


def test_a_row_knows_the_logs_of_all_that_it_is_made_from(checkout: Callable[[], Path], call: Callable) -> None:
    """Upstream first, so that the first error that is found is the reason."""
    root = checkout()
    formats = "reference: ct2-int8\nformats: [ct2-int8, bnb-nf4, gguf-q8_0]\ndevice: cpu\n"
    (root / "study.yaml").write_text("models: {demo: {source: demo}}\n" + formats)
    result = call(SNAKEMAKE, "artifacts/report/study.json", *STUDY_OPTIONS, cwd=root)
    assert result.returncode == 0, result.stderr
    cells = json.loads((root / "artifacts/report/study.json").read_text())["cells"]
    logs = {cell["format"]: [Path(log).stem for log in cell["logs"]["artifact"]] for cell in cells}
    assert logs["bnb-nf4"][-1] == "bnb-nf4" and "fp16" in logs["bnb-nf4"]
    assert "fp16" not in logs["ct2-int8"] and "llama.cpp" not in logs["ct2-int8"]
    places = [logs["gguf-q8_0"].index(name) for name in ("llama.cpp", "tokens-calibration", "gguf-f16", "imatrix")]
    assert places == sorted(places)


def test_a_build_without_a_gate_waits_for_tokens_too(root: Path, call: Callable) -> None:
    """Tools load a tokenizer without limits; by then tokens.tokenize_texts has ended within its own."""
    (root / "study.yaml").write_text("models: {m: {source: {random: demo/config.json}}}\nformats: [fp16, ct2-int8]\n")
    result = call(SNAKEMAKE, "-n", "artifacts/m/ct2-int8", *STUDY_OPTIONS, cwd=root)
    assert result.returncode == 0, result.stderr
    assert "artifacts/m/tokens/evaluation.json" in result.stdout + result.stderr


@pytest.fixture(scope="module")
def random_study(checkout: Callable[[], Path], call: Callable, torch_python: Path, tools_python: Path) -> Path:
    """A study of a model of random weights in two formats, finished; whoever changes it mends it again."""
    root = checkout()
    shape = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    shape |= {"vocab_size": 640, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    (root / "shape.json").write_text(json.dumps(shape))
    options = study(root, "models: {shape: {source: {random: shape.json}}}\nformats: [fp16, ct2-int8]\n" + LATENCY)
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 0, result.stderr
    return root


def test_random_weights_are_measured_for_speed_only(random_study: Path) -> None:
    root = random_study
    assert not (root / "envs/torch").exists()  # interpreters: replaces the workflow's own environments
    table = rows(root)
    assert all(float(row["tokens_per_second"]) > 0 for row in table.values())
    assert float(table["fp16"]["bits_per_weight"]) == pytest.approx(16, rel=0.02)
    assert float(table["ct2-int8"]["bits_per_weight"]) == pytest.approx(8, rel=0.1)  # no two tensors are stored as one
    assert all(row["perplexity"] == row["kld_mean"] == row["pareto"] == "" for row in table.values())
    results = json.loads((root / "artifacts/report/results.json").read_text())
    assert {row["missing"]["perplexity"] for row in results["rows"]} == {"random weights: measured for speed only"}
    assert "measured for speed only" in (root / "artifacts/report/index.html").read_text()


@pytest.mark.parametrize("path", sorted(REPO.glob("config/examples/*.yaml")), ids=lambda path: path.stem)
def test_every_example_can_be_planned_without_a_network(root: Path, call: Callable, path: Path) -> None:
    result = call(
        SNAKEMAKE, "-n", "--quiet", "all", "--cores", 2, "--configfile", f"config/examples/{path.name}", cwd=root
    )
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    if path.stem == "my-model":  # whoever takes it writes the folder into it
        assert errors == ["config error: models.my-model.source: there is no folder /path/to/my-model"]
    else:
        assert result.returncode == 0 and not errors, result.stderr


@contextmanager
def keep_files(*paths: Path) -> Iterator[None]:
    """Files that have their content and times again afterwards, by which Snakemake goes."""
    before = {path: (path.read_bytes(), path.stat()) for path in paths}
    try:
        yield
    finally:
        for path, (content, status) in before.items():
            path.write_bytes(content)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def plan_jobs(call: Callable, root: Path, *options: str) -> list[str]:
    """The rules of a dry run's jobs with what they write, without Snakemake's word on how, but the target's."""
    result = call(SNAKEMAKE, "-n", *options, cwd=root)
    assert result.returncode == 0, result.stderr
    block = r"rule (\w+):\n(?:    .*\n)*?    output: ([^,\n]*?)(?: \(update\))?[,\n]"
    found = re.findall(block, result.stdout + result.stderr)
    return sorted(f"{rule} {output}" for rule, output in found)


def data(page: Path) -> dict[str, Any]:
    """What a page's scripts show."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())[1])


def test_the_page_names_the_command_that_measures_just_the_disturbed_rows_again(
    random_study: Path, call: Callable, tools_python: Path, tmp_path: Path
) -> None:
    said = {"fp16": [], "ct2-int8": ["a neighbour"]}  # whatever disturbed this machine
    paths = {random_study / f"artifacts/shape/latency/{name}.json": interference for name, interference in said.items()}
    with keep_files(*paths):
        for path, interference in paths.items():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"interference": interference}))
        made = call(
            tools_python, "scripts/quantmill", "report.write", "artifacts/report/study.json", tmp_path, cwd=random_study
        )
        assert made.returncode == 0, made.stderr
    command = data(tmp_path / "index.html")["commands"]["disturbed"]
    name, *options = shlex.split(command)
    assert name == "snakemake"
    assert options[-1] == "artifacts/shape/latency/ct2-int8.json"
    assert "--configfile study.yaml" in command
    assert plan_jobs(call, random_study, "report", *STUDY_OPTIONS) == []
    assert plan_jobs(call, random_study, *options) == [
        "latency artifacts/shape/latency/ct2-int8.json",
        "page artifacts/report/index.html",
    ]


def test_a_page_of_an_incomplete_study_is_still_to_be_made(
    random_study: Path, call: Callable, tools_python: Path
) -> None:
    report = random_study / "artifacts/report"
    with keep_files(*report.iterdir()):
        command = [tools_python, "scripts/quantmill", "report.write", "--incomplete", report / "study.json", report]
        made = subprocess.run(command, cwd=random_study, input="[]", capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        for target in ("report", "artifacts/report/index.html"):
            assert plan_jobs(call, random_study, target, *STUDY_OPTIONS) == ["page artifacts/report/index.html"]


def test_after_an_edit_and_a_failure_no_row_of_before_is_shown_as_current(
    random_study: Path, call: Callable, tmp_path: Path
) -> None:
    """Its weights cannot be made, and what was built and measured of the others lies there."""
    root = shutil.copytree(random_study, tmp_path / "edited", symlinks=True)
    (root / "shape.json").write_text('{"model_type": "nothing that is known"}')
    result = call(SNAKEMAKE, "report", *STUDY_OPTIONS, cwd=root)
    assert result.returncode == 1
    assert "Not complete: 2 of 2 formats failed." in result.stderr.splitlines()
    found = json.loads((root / "artifacts/report/results.json").read_text())
    assert [row["tokens_per_second"] for row in found["rows"]] == [None, None]
    assert {row["missing"]["size_bytes"].split(": ")[0] for row in found["rows"]} == {"failed"}
    assert (root / "artifacts/shape/latency/fp16.json").exists()
    assert len(data(root / "artifacts/report/index.html")["unfinished"]) == 3


def test_where_addresses_are_limited_the_page_has_no_plots_and_says_why(
    random_study: Path, tools_python: Path, tmp_path: Path
) -> None:
    limit = 8 * 10**9  # bytes, as a batch system would set it
    command = [tools_python, "scripts/quantmill", "report.write", "artifacts/report/study.json", tmp_path]
    made = subprocess.run(
        command,
        cwd=random_study,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert made.returncode == 0, made.stderr
    (line,) = made.stderr.splitlines()
    assert "the plots could not be drawn" in line
    assert "a limit (ulimit -v) allows 8 GB" in line
    report = random_study / "artifacts/report"
    for name in ("results.json", "results.csv"):
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes()
    assert (tmp_path / "results.parquet").read_bytes()[:4] == b"PAR1"
    for name in ("quality-speed.svg", "quality-size.svg"):
        said = " ".join(ElementTree.parse(tmp_path / name).getroot().itertext())
        assert "The plot could not be drawn." in said
        assert "ulimit -v" in said
    assert (tmp_path / "quality-speed.png").read_bytes().startswith(b"\x89PNG")
    page = data(tmp_path / "index.html")
    assert "ulimit -v" in page["undrawn"]
    assert page["plots"] == page["detail plots"] == {}
    assert data(report / "index.html")["undrawn"] is None


def test_a_local_folder_of_safetensors(root: Path, call: Callable, tools_python: Path, demo: Path) -> None:
    """Its weights pass the gate, and are those that other sources of the model give."""
    shutil.copytree(demo / "artifacts/demo/safetensors", root / "my model's folder")
    (root / "my model's folder/quantmill.json").unlink()
    for name in ("{model}.txt", "last.ckpt"):  # not Snakemake's wildcard, and no part of a model
        (root / "my model's folder" / name).touch()
    options = study(root, "models: {mine: {source: {path: my model's folder}}}\nformats: [fp16]\n" + SHORT + LATENCY)
    options[options.index("report")] = "artifacts/mine/fp16"
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 0, result.stderr
    found = check_whole(root / "artifacts/mine/fp16")
    assert found == check_whole(demo / "artifacts/demo/fp16")
    assert (root / "artifacts/mine/source/model.safetensors.index.json").exists()


def test_a_link_that_is_turned_to_older_files_leads_to_others(
    random_study: Path, call: Callable, tmp_path: Path
) -> None:
    root = shutil.copytree(random_study, tmp_path / "linked", symlinks=True)
    for link, folder in (("weights", "demo"), ("theirs", "artifacts/shape/ct2-int8")):
        for number in (1, 2):
            copy = shutil.copytree(root / folder, root / f"{link}-{number}")
            os.utime(copy / "config.json", (number, number))  # seconds since 1970
        (root / link).symlink_to(f"{link}-1")
    models = "linked: {source: {path: weights}}, "
    models += "shape: {source: {random: shape.json}, prebuilt: {theirs: {layout: ct2, path: theirs}}}"
    study(root, f"models: {{{models}}}\nformats: [fp16]\n" + LATENCY)
    targets = [*STUDY_OPTIONS, "--", "artifacts/linked/source", "artifacts/shape/theirs"]
    result = call(SNAKEMAKE, *targets, cwd=root)
    assert result.returncode == 0, result.stderr
    assert plan_jobs(call, root, *targets) == []
    for link in ("weights", "theirs"):
        (root / link).unlink()
        (root / link).symlink_to(f"{link}-2")
    assert plan_jobs(call, root, *targets) == ["prebuilt artifacts/shape/theirs", "source artifacts/linked/source"]


def test_a_gpu_that_is_not_there_is_one_line_and_leaves_no_result(root: Path, call: Callable) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    options = study(root, "models: {demo: {source: demo}}\nformats: [fp16]\ndevice: cuda\n" + LATENCY)
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 1
    assert "error: device cuda is missing: no NVIDIA driver" in result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
    assert not list((root / "artifacts").glob("*/latency/*"))
    (_, failed) = data(root / "artifacts/report/index.html")["unfinished"]
    assert failed.startswith("demo/fp16: failed: device cuda is missing: no NVIDIA driver")


def test_after_failures_a_page_shows_the_rest_and_says_why(
    root: Path, call: Callable, demo: Path, tmp_path: Path
) -> None:
    """One model's weights are damaged, and one format's environment cannot be made."""
    shutil.copytree(root / "demo", root / "torn")
    shard = root / "torn/pytorch_model-00002-of-00003.bin"
    shard.write_bytes(shard.read_bytes()[:100_000])
    (root / "envs/mlc.txt").write_text("quantmill-nowhere==1\n")
    text = "models: {demo: {source: demo}, torn: {source: {path: torn}, formats: [fp16]}}\n"
    text += "formats: [fp16, mlc-q4f16_1]\n" + SHORT + LATENCY
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
    result = call(SNAKEMAKE, *study(root, text), cwd=root, **settings)
    assert result.returncode == 1
    assert "Traceback" not in result.stdout + result.stderr
    assert re.search(rf"error: .*{shard.name}: not a whole zip file", result.stderr + result.stdout)
    assert not list((root / "artifacts").glob("torn/*"))  # before a byte was copied
    lines = result.stderr.splitlines()
    said = lines.index("Not complete: 2 of 3 rows (a model in a format) failed.")
    assert re.match(r"demo/mlc-q4f16_1: failed: .*quantmill-nowhere", lines[said + 1])
    assert re.fullmatch(rf"torn/fp16: failed: .*{shard.name}: not a whole zip .*", lines[said + 2])
    assert lines[said + 3 : said + 5] == [
        "What was measured: artifacts/report/index.html",
        "To go on: snakemake report --cores 8 --configfile study.yaml",
    ]
    report = root / "artifacts/report"
    page = data(report / "index.html")
    assert page["unfinished"] == lines[said : said + 3]
    assert page["commands"]["resume"] in lines[said + 4]
    found = json.loads((report / "results.json").read_text())
    good, *failed = found["rows"]
    assert good["tokens_per_second"] > 0
    assert good["perplexity"] == pytest.approx(float(rows(demo)["fp16"]["perplexity"]), rel=1e-6)
    for row, why in zip(failed, ("quantmill-nowhere", shard.name), strict=True):
        assert row["tokens_per_second"] is row["size_bytes"] is row["perplexity"] is None
        reasons = {column: reason for column, reason in row["missing"].items() if column != "run"}  # it is the default
        assert all(reason.startswith("failed: ") and why in reason for reason in reasons.values())
    # and when the file is there, the next run has the rest to do
    again = plan_jobs(call, root, *study(root, text))
    shutil.copy(root / "demo" / shard.name, shard)
    mended = plan_jobs(call, root, *study(root, text))
    assert {"safetensors artifacts/torn/safetensors", "page artifacts/report/index.html"} <= set(again)
    assert {f"{name} artifacts/torn/{name}" for name in ("source", "safetensors", "fp16")} <= set(mended)
    assert {"latency artifacts/torn/latency/fp16.json", "page artifacts/report/index.html"} <= set(mended)
    assert not [job for job in again + mended if "artifacts/demo/" in job and "mlc" not in job]


@pytest.mark.slow
def test_what_leads_to_results_goes_and_results_stay(root: Path, call: Callable) -> None:
    options = study(root, ONE_FORMAT.replace("[fp16]", "[fp16, ct2-float16]") + "remove_intermediates: true\n")
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 0, result.stderr
    folder = root / "artifacts/demo"
    kept = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert kept == {"fp16", "ct2-float16", "tokens", "latency", "quality", "expected.json", "tensors.json"}
    assert not list(folder.rglob("*-logits.npy"))
    assert all(float(row["perplexity"]) > 1 for row in rows(root).values())
    assert jobs(call, root, *options[3:]) == set()
