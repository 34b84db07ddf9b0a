"""`make plan`: what a study will take, before any of it is done."""

import json
import os
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from hub_server import Repository, serve
from model_folders import demo_in_float8
from recorded_rows import jobs_of, of_file

from quantmill.common.atomic import can_clone
from quantmill.plan.jobs import DECODING, HARNESS, UNKNOWN_MINUTES, Jobs, job_mb


@pytest.fixture
def plan(
    checkout: Callable[[], Path], tools_python: Path, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess]:
    root = checkout()

    def run(*options: object, **environment: str) -> subprocess.CompletedProcess:
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")} | environment
        command = [tools_python, "scripts/quantmill", "plan.show", "--snakemake-python", REPO / ".venv/bin/python"]
        command = [*map(str, (*command, *options))]
        return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)

    run.root = root
    return run


def test_a_disk_that_is_too_small_is_one_line(plan: Callable) -> None:
    study = "config/examples/speed-of-a-shape.yaml"
    result = plan(study, "--disk", "33")
    assert result.returncode == 1
    # float16 source and ct2-float16 of 13.477 GB each, ct2-int8 of 6.744: safetensors and fp16 are links
    assert result.stderr.splitlines() == [
        f"error: {plan.root}: the study takes 33.7 GB and 33.0 GB are free; free some disk or leave formats out"
    ]
    assert "6,738,415,616" in result.stdout
    assert re.search(r"^jobs: .*\b3 artifact, .*\b3 latency, 1 page, 1 safetensors, 1 source", result.stdout, re.M)
    assert not (plan.root / "artifacts").exists()
    assert plan(study, "--disk", "34").returncode == 0


def test_the_plan_leaves_out_what_is_there(plan: Callable) -> None:
    first = plan("--disk", "1")
    assert first.returncode == 0, first.stderr
    assert re.search(r"demo +safetensors +11\.\d MB", first.stdout)  # of .bin, so no link
    call = [REPO / ".venv/bin/snakemake", "--cores", "1", "--quiet", "all", "--", "artifacts/demo/safetensors"]
    config = (plan.root / "config/config.yaml").read_text()
    tools = REPO / "envs/tools/bin/python"
    (plan.root / "config/config.yaml").write_text(f"{config}\ninterpreters: {{tools: {tools}}}\n")
    subprocess.run(list(map(str, call)), cwd=plan.root, check=True)
    second = plan("--disk", "1")
    assert not re.search(r"demo +s", second.stdout)
    peaks = [float(re.search(r"peak: ([\d.]+) MB", result.stdout)[1]) for result in (first, second)]
    copy = float(re.search(r"demo +source +([\d.]+) MB", first.stdout)[1])
    assert copy == pytest.approx(0 if can_clone(plan.root) else 11.8, abs=0.06)
    assert peaks[0] - peaks[1] == pytest.approx(copy + 11.8, abs=0.16)


def test_copies_are_counted_and_shared_bytes_are_not(plan: Callable, tmp_path: Path) -> None:
    for name in ("model", "theirs"):
        (tmp_path / name).mkdir()
        config = json.loads((REPO / "demo/config.json").read_text()) | {"dtype": "float16"}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        header = b'{"a":{"dtype":"U8","shape":[4000000],"data_offsets":[0,4000000]}}'
        (tmp_path / name / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4_000_000))
        (tmp_path / name / "optimizer.pt").write_bytes(bytes(9_000_000))
    prebuilt = {"theirs": {"path": str(tmp_path / "theirs"), "layout": "gptq", "engine": "gptqmodel"}}
    model = {"source": {"path": str(tmp_path / "model")}, "formats": ["fp16"], "prebuilt": prebuilt}
    (plan.root / "study.yaml").write_text(json.dumps({"models": {"m": model}}))
    said = plan("study.yaml", "--disk", "10").stdout
    names = ("source", "safetensors", "fp16", "theirs")
    disk = {name: re.search(rf"^m +{name} +(\S+ \S+)", said, re.M)[1] for name in names}
    copied = "0.0 MB" if can_clone(plan.root) else "4.0 MB"
    assert disk == {"source": copied, "safetensors": "0.0 MB", "fp16": "0.0 MB", "theirs": copied}


def test_a_source_in_low_bits_is_planned_as_it_is_decoded(plan: Callable, tmp_path: Path) -> None:
    """The demo's 5.9 million weights take two bytes each on the disk, and one in float8 on the hub."""
    folder = demo_in_float8(tmp_path / "m")
    with serve() as hub:
        repository = hub.repositories["models/acme/m"] = Repository.of(folder)
        sources = {"local": {"path": str(folder)}, "hub": {"hub": "acme/m"}}
        models = {name: {"source": source} for name, source in sources.items()}
        (plan.root / "study.yaml").write_text(json.dumps({"models": models, "formats": ["fp16"]}))
        said = plan("study.yaml", "--disk", "10", HF_HUB_OFFLINE="0", HF_ENDPOINT=hub.endpoint)
    assert said.returncode == 0, said.stderr
    wanted = sum(len(data) for name, data in repository.files.items() if name != "config.json") / 1e6
    assert 6.5 < wanted < 7.5
    assert re.search(r"^local +5,869,312 +11\.7 MB +0\.0 MB$", said.stdout, re.M)
    assert re.search(rf"^hub +5,869,312 +11\.7 MB +{wanted:.1f} MB$", said.stdout, re.M)
    for name in sources:
        assert re.search(rf"^{name} +source +11\.7 MB +{job_mb(DECODING)} MB ", said.stdout, re.M)
        assert re.search(rf"^{name} +safetensors +0\.0 MB ", said.stdout, re.M)
        assert re.search(rf"^{name} +fp16 +0\.0 MB ", said.stdout, re.M)  # the demo's float16 stays


def test_a_source_that_cannot_be_decoded_is_one_line(plan: Callable, tmp_path: Path) -> None:
    folder = demo_in_float8(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    (plan.root / "study.yaml").write_text(json.dumps({"models": {"m": {"source": {"path": str(folder)}}}}))
    result = plan("study.yaml")
    line = f"error: {folder}: its weights are quantized (awq); name a model with the original weights"
    assert (result.returncode, result.stderr.splitlines()) == (1, [line])


def test_a_mistake_in_the_config_is_one_line(plan: Callable) -> None:
    (plan.root / "study.yaml").write_text("models: {m: {source: demo}}\nformats: [fp17]\n")
    result = plan("study.yaml")
    assert result.returncode == 1
    assert result.stderr.splitlines() == ["error: config error: formats: unknown format 'fp17'; did you mean 'fp16'?"]


def test_only_the_config_of_a_model_is_fetched(plan: Callable) -> None:
    (plan.root / "study.yaml").write_text("models: {tiny: {source: {hub: acme/tiny}}}\n")
    offline = plan("study.yaml")
    assert offline.returncode == 0
    assert "HF_HUB_OFFLINE is set" in offline.stdout
    assert "disk at peak: at least" in offline.stdout
    with serve() as hub:
        repository = hub.repositories["models/acme/tiny"] = Repository.of(REPO / "demo")
        result = plan("study.yaml", HF_HUB_OFFLINE="0", HF_ENDPOINT=hub.endpoint)
        fetched = {path.rsplit("/", 1)[1] for method, path, _ in hub.log if method == "GET" and "/resolve/" in path}
    assert result.returncode == 0, result.stderr
    assert "5,869,312" in result.stdout
    assert fetched == {"config.json"}
    wanted = sum(len(data) for name, data in repository.files.items() if name != "config.json")
    assert f"download: {wanted / 1e6:.1f} MB" in result.stdout


def test_a_prebuilt_artifact_of_the_hub_has_unknown_size(plan: Callable) -> None:
    study = "formats: [fp16]\nmodels: {m: {source: demo%s}}\n"
    (plan.root / "study.yaml").write_text(study % ", prebuilt: {theirs: {layout: ct2, hub: acme/tiny}}")
    assert "download: at least 0.0 MB" in plan("study.yaml", "--disk", "1").stdout
    (plan.root / "study.yaml").write_text(study % "")
    assert "download: 0.0 MB" in plan("study.yaml", "--disk", "1").stdout


def test_gpus_that_jobs_hold_at_once(plan: Callable) -> None:
    study = """
models: {m: {source: demo}}
formats: [fp16]
device: %s
runs:
  one: {engine: vllm-serve, formats: [fp16]}
  tp: {engine: vllm-serve, formats: [fp16], gpus: %d}
interpreters: {vllm: /bin/true}
"""
    for device, gpus, line in (
        ("cuda", 4, "4 (m/fp16@tp); run with --resources gpu=4 hub=2"),
        ("cuda", 1, "1"),
        ("cpu", 1, "0"),
    ):
        (plan.root / "study.yaml").write_text(study % (device, gpus))
        result = plan("study.yaml", "--disk", "1")
        assert result.returncode == 0, result.stderr
        assert f"GPUs of the largest job: {line}\n" in result.stdout
    several = study.replace("formats: [fp16]\ndevice", "formats: [fp16, gptq-int4]\nquantizers: {gpus: 8}\ndevice")
    (plan.root / "study.yaml").write_text(several % ("cuda", 1))
    result = plan("study.yaml", "--disk", "1")
    assert "GPUs of the largest job: 8 (m/gptq-int4); run with --resources gpu=8 hub=2\n" in result.stdout
    assert re.search(r"^GPU memory of the largest build: \d+ MB \(m/gptq-int4\)$", result.stdout, re.M)
    (plan.root / "study.yaml").write_text(study % ("cuda", 8))
    assert plan("study.yaml").stderr.startswith("error: config error: runs.tp: tensor_parallel_size 8 does not fit m's")


def test_loads_take_longer_with_more_users(plan: Callable) -> None:
    study = """
models: {m: {source: {random: config/examples/llama-2-7b.json}}}
formats: [fp16]
device: cuda
runs: {served: {engine: vllm-serve, formats: [fp16]}}
loads: {concurrency: [%s]}
interpreters: {vllm: /bin/true}
"""
    minutes = []
    for users in (1, 59):
        (plan.root / "study.yaml").write_text(study % users)
        printed = plan("study.yaml", "--disk", "100").stdout
        minutes.append(float(re.search(r"fp16@served .* ([\d.]+) min$", printed, re.M)[1]))
    assert minutes[0] < minutes[1]
    # on any machine: without a GPU, as on one that was measured
    assert re.search(r"device cuda(, as on an NVIDIA H200: no GPU is here)?: [\d.]+ min$", printed, re.M)


def test_a_format_without_figures_is_unknown(plan: Callable) -> None:
    registration = 'FORMATS["mine"] = Format(layout="hf", engine="transformers", env="tools", program="build.fp16")'
    (plan.root / "rules/formats/mine.smk").write_text(registration)
    (plan.root / "study.yaml").write_text("models: {m: {source: demo}}\nformats: [fp16, mine]\ndevice: cpu\n")
    result = plan("study.yaml", "--disk", "1")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^m +mine +unknown +unknown +unknown$", result.stdout, re.M)
    assert re.search(r"^m +fp16 +0\.0 MB +1,215 MB", result.stdout, re.M)
    assert "disk at peak: at least" in result.stdout
    assert "memory of the largest job: at least" in result.stdout


def test_a_format_without_figures_takes_float32_twice() -> None:
    model = of_file("config/examples/llama-2-7b.json")
    jobs = jobs_of("cpu")
    unknown = Jobs(jobs.study, jobs.reference, {}, jobs.engines)
    ask = unknown.build("mine", "transformers", model, gated=True)
    weights = 8 * 6738.4  # MB
    assert (ask.known, ask.seconds, ask.minutes) == (False, None, 720)
    assert ask.mb == pytest.approx(4160 + weights, abs=1)
    assert ask.disk_mb == pytest.approx(50 + weights, abs=1)
    other_engine = jobs.latency("fp16", "other", model, prompts=9)
    assert (other_engine.known, other_engine.seconds, other_engine.minutes) == (False, None, 720)
    assert other_engine.mb == ask.mb
    scored = jobs.score("fp16", "other", model, positions=10)
    assert (scored.known, scored.seconds, scored.minutes, scored.mb) == (False, None, 720, ask.mb)
    assert jobs.latency("fp16", "transformers", model, prompts=9).known


def test_tasks_take_the_harness_and_the_engine() -> None:
    costs, model = jobs_of("cpu"), of_file("config/examples/llama-1.1b.json")
    few, many, unknown = (costs.tasks("fp16", "transformers", model, number) for number in (10, 1000, None))
    assert few.mb == many.mb == unknown.mb == costs.score("fp16", "transformers", model, 1).mb + HARNESS
    assert few.minutes < many.minutes
    assert unknown.minutes == UNKNOWN_MINUTES
    assert few.known and not costs.tasks("nobody-said", "transformers", model, 10).known
