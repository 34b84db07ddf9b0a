"""Studies of one's own, each in a fresh copy of the project: other sources, and what bad input leaves."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from workflows import CHARACTERS, LATENCY, ONE_FORMAT, SNAKEMAKE, rows, study


@pytest.fixture
def root(checkout: Callable[[], Path], torch_python: Path, tools_python: Path) -> Path:
    """A fresh copy of the project; the environments of this one serve it."""
    return checkout()


def test_random_weights_are_measured_for_speed_only(root: Path, call: Callable) -> None:
    shape = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    shape |= {"vocab_size": 640, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    (root / "shape.json").write_text(json.dumps(shape))
    options = study(root, "models: {shape: {source: {random: shape.json}}}\nformats: [fp16, ct2-int8]\n" + LATENCY)
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 0, result.stderr
    assert not (root / "envs/torch").exists()  # interpreters: replaces the workflow's own environments
    table = rows(root)
    assert all(float(row["tokens_per_second"]) > 0 for row in table.values())
    assert float(table["fp16"]["bits_per_weight"]) == pytest.approx(16, rel=0.02)
    assert float(table["ct2-int8"]["bits_per_weight"]) == pytest.approx(8, rel=0.1)  # no two tensors are stored as one
    assert all(row["perplexity"] == row["kld_mean"] == row["pareto"] == "" for row in table.values())
    results = json.loads((root / "artifacts/report/results.json").read_text())
    assert {row["missing"]["perplexity"] for row in results["rows"]} == {"random weights: measured for speed only"}
    assert "measured for speed only" in (root / "artifacts/report/index.html").read_text()


def test_a_local_folder_of_safetensors(root: Path, call: Callable, tools_python: Path, demo: Path) -> None:
    shutil.copytree(demo / "artifacts/demo/safetensors", root / "my model's folder")
    (root / "my model's folder/quantmill.json").unlink()
    (root / "my model's folder/{model}.txt").touch()  # not Snakemake's wildcard
    options = study(root, "models: {mine: {source: {path: my model's folder}}}\nformats: [fp16]\n" + LATENCY)
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 0, result.stderr
    assert rows(root)["fp16"]["perplexity"] == rows(demo)["fp16"]["perplexity"]
    assert (root / "artifacts/mine/source/model.safetensors.index.json").exists()


def test_a_gpu_that_is_not_there_is_one_line_and_leaves_no_result(root: Path, call: Callable, demo: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    options = study(root, "models: {demo: {source: demo}}\nformats: [fp16]\ndevice: cuda\n" + LATENCY)
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 1
    assert "error: device cuda is not there: no NVIDIA driver" in result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
    assert not list((root / "artifacts").glob("*/latency/*"))
    assert not (root / "artifacts/report/index.html").exists()


def test_damaged_weights_are_one_line_and_leave_no_artifact(root: Path, call: Callable) -> None:
    shard = root / "demo/pytorch_model-00002-of-00003.bin"
    shard.write_bytes(shard.read_bytes()[:100_000])
    options = study(root, "models: {demo: {source: demo}}\nformats: [fp16]\n" + LATENCY)
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 1
    assert re.search(r"error: .*pytorch_model-00002-of-00003\.bin: not a whole zip file", result.stderr + result.stdout)
    assert sorted(path.name for path in (root / "artifacts/demo").iterdir()) == ["source"]


def test_after_a_failure_a_page_shows_the_rest_and_says_why(root: Path, call: Callable) -> None:
    shutil.copytree(root / "demo", root / "torn")
    (root / "torn/pytorch_model-00002-of-00003.bin").write_bytes(b"no zip")
    text = "models: {demo: {source: demo}, torn: {source: {path: torn}}}\nformats: [fp16]\n" + LATENCY
    result = call(SNAKEMAKE, *study(root, text), cwd=root)
    assert result.returncode == 1
    page = "artifacts/report/incomplete/index.html"
    assert f"What was measured, and what failed: {page}" in result.stderr
    assert (root / page).exists()
    assert not (root / "artifacts/report/index.html").exists()
    found = json.loads((root / "artifacts/report/incomplete/results.json").read_text())
    good, torn = found["rows"]
    assert good["tokens_per_second"] > 0
    recorded = json.loads((REPO / "results/demo/results.json").read_text())["rows"][0]
    assert recorded["format"] == "fp16"
    assert good["perplexity"] == pytest.approx(recorded["perplexity"], rel=1e-4)
    assert torn["tokens_per_second"] is torn["size_bytes"] is torn["perplexity"] is None
    why = "pytorch_model-00002-of-00003.bin"
    assert all(reason.startswith("failed: ") and why in reason for reason in torn["missing"].values())
    # and when the file is there, the next run has the rest to do
    shutil.copy(root / "demo/pytorch_model-00002-of-00003.bin", root / "torn")
    result = call(SNAKEMAKE, "-n", *study(root, text), cwd=root)
    assert result.returncode == 0, result.stderr
    planned = set(re.findall(r"rule (\w+):\n(?:    .*\n)*?    wildcards: .*model=torn", result.stdout))
    assert {"source", "safetensors", "fp16", "latency", "quality"} <= planned


def test_an_environment_that_cannot_be_made_is_a_reason_on_the_page(root: Path, call: Callable, tmp_path: Path) -> None:
    (root / "envs/mlc.txt").write_text("quantmill-nowhere==1\n")
    (root / "short.txt").write_text((root / "config/evaluation.txt").read_text()[:CHARACTERS])
    options = study(root, ONE_FORMAT.replace("[fp16]", "[fp16, mlc-q4f16_1]"))
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
    result = call(SNAKEMAKE, *options, cwd=root, **settings)
    assert result.returncode == 1
    assert "Traceback" not in result.stdout + result.stderr
    found = json.loads((root / "artifacts/report/incomplete/results.json").read_text())
    good, failed = found["rows"]
    assert good["tokens_per_second"] > 0
    assert failed["tokens_per_second"] is failed["size_bytes"] is failed["perplexity"] is None
    assert all("quantmill-nowhere" in reason for reason in failed["missing"].values())
