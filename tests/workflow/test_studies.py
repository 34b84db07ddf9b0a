"""Studies of one's own, each in a fresh copy of the project: other sources, and what bad input leaves."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO
from model_folders import demo_in_float8, float8_levels
from workflows import LATENCY, ONE_FORMAT, SHORT, SNAKEMAKE, check_whole, jobs, page_data, plan_jobs, rows, study

from quantmill import layouts
from quantmill.checkpoint import shards
from quantmill.common import manifest

STUDY_OPTIONS = ("--cores", "8", "--configfile", "study.yaml")


@pytest.fixture
def root(checkout: Callable[[], Path], torch_python: Path, tools_python: Path) -> Path:
    """Copy the project; the environments of this one serve the copy."""
    return checkout()


@pytest.fixture(scope="module")
def clone(checkout: Callable[[], Path], torch_python: Path, tools_python: Path) -> Path:
    """Copy the project; nothing is made in the copy."""
    return checkout()


def test_a_row_knows_the_logs_of_its_jobs(checkout: Callable[[], Path], call: Callable) -> None:
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


def test_a_build_without_a_gate_waits_for_tokens(clone: Path, call: Callable) -> None:
    """Tools load a tokenizer without limits; by then tokens.tokenize_texts has ended within its own."""
    (clone / "study.yaml").write_text("models: {m: {source: {random: demo/config.json}}}\nformats: [fp16, ct2-int8]\n")
    result = call(SNAKEMAKE, "-n", "artifacts/m/ct2-int8", *STUDY_OPTIONS, cwd=clone)
    assert result.returncode == 0, result.stderr
    assert "artifacts/m/tokens/evaluation.json" in result.stdout + result.stderr


@pytest.mark.parametrize("path", sorted(REPO.glob("config/examples/*.yaml")), ids=lambda path: path.stem)
def test_every_example_can_be_planned_without_a_network(clone: Path, call: Callable, path: Path) -> None:
    result = call(
        SNAKEMAKE, "-n", "--quiet", "all", "--cores", 2, "--configfile", f"config/examples/{path.name}", cwd=clone
    )
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    if path.stem == "my-model":  # whoever takes it writes the folder into it
        assert errors == ["config error: models.my-model.source: there is no folder /path/to/my-model"]
    else:
        assert result.returncode == 0 and not errors, result.stderr


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


def test_a_local_folder_in_float8(root: Path, call: Callable) -> None:
    """Its decoded weights pass the gate, and what is made of them says where they came from."""
    published = demo_in_float8(root / "published")
    options = study(root, "models: {mine: {source: {path: published}}}\nformats: [fp16]\n" + SHORT + LATENCY)
    options[options.index("report")] = "artifacts/mine/fp16"
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 0, result.stderr
    made = json.loads((root / "artifacts/mine/fp16/quantmill.json").read_text())
    said = {"layout": "fp8", "weights": "float8 in blocks of 128 x 128", "dtype": "float16", "tensors": 7 * 7}
    assert made["source"]["decoded"] == said
    assert made["source"]["sha256"] == {"model.safetensors": manifest.sha256(published / "model.safetensors")}
    assert made["parameter_count"] == 5_869_312
    assert made["bits_per_weight"] == pytest.approx(16, abs=0.02)
    assert made["gate"]["faithful"]["divergence"] <= 1e-9
    assert made["gate"]["reference"] == pytest.approx(made["gate"]["perplexity"], rel=1e-6)
    stored, name = shards.find(published).tensors(), "model.layers.3.mlp.down_proj.weight"
    codes = np.frombuffer(b"".join(map(bytes, stored[name].chunks())), np.uint8).reshape(stored[name].shape)
    values = np.concatenate([float8_levels(), [np.nan], -float8_levels(), [np.nan]])[codes]
    scales = np.kron(layouts.array(stored[f"{name}_scale_inv"]), np.ones((128, 128), np.float32))
    expected = (values.astype(np.float32) * scales[: len(values), : len(values[0])]).astype(np.float16)
    found = layouts.array(shards.find(root / "artifacts/mine/fp16").tensors()[name])
    assert np.array_equal(found, expected)


def test_a_missing_gpu_is_one_line(root: Path, call: Callable) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    options = study(root, "models: {demo: {source: demo}}\nformats: [fp16]\ndevice: cuda\n" + LATENCY)
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 1
    assert "error: device cuda is missing: no NVIDIA driver" in result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
    assert not list((root / "artifacts").glob("*/latency/*"))
    (_, failed) = page_data((root / "artifacts/report/index.html").read_text())["unfinished"]
    assert failed.startswith("demo/fp16: failed: device cuda is missing: no NVIDIA driver")


@pytest.mark.slow
def test_a_page_after_failures_shows_the_rest(root: Path, call: Callable, demo: Path, tmp_path: Path) -> None:
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
    page = page_data((report / "index.html").read_text())
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
    rules = {"source": "source", "safetensors": "safetensors", "artifact": "fp16"}
    assert {f"{rule} artifacts/torn/{name}" for rule, name in rules.items()} <= set(mended)
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
    assert not list(folder.rglob("*-predictions"))
    assert all(float(row["perplexity"]) > 1 for row in rows(root).values())
    assert jobs(call, root, *options[3:]) == set()
