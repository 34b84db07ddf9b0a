"""What jobs ask a scheduler for: memory and time, by a model's shape, against what recorded runs took."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPO, RUN
from recorded_rows import ENGINES, ROWS, SAMPLES, jobs_of, of_file, of_row

from quantmill.plan.jobs import LEAST, SNAKEMAKE, job_mb
from quantmill.plan.resources import CUDA_BUILD, MB


def test_jobs_say_what_they_take(checkout: Callable[[], Path]) -> None:
    root = checkout()
    command = [REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", "report"]
    fresh = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    assert fresh.returncode == 0, fresh.stderr
    assert "mem_mb=<TBD>" in fresh.stdout  # no model is there yet
    for name in ("source", "safetensors", "fp16"):
        (root / "artifacts/demo" / name).mkdir(parents=True)
        shutil.copy(root / "demo/config.json", root / "artifacts/demo" / name)
    config = (root / "config/config.yaml").read_text().replace("device: auto", "device: cpu")
    (root / "config/config.yaml").write_text(config)
    result = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    jobs = re.findall(r"^(?:local)?rule (\w+):$(.*?)resources: (.*?)$", result.stdout, re.M | re.S)
    silent = {rule for rule, _, resources in jobs if "mem_mb=" not in resources}
    assert silent <= {"environment", "study", "page", "report"}
    asks = [int(found[1]) for _, _, resources in jobs if (found := re.search(r"mem_mb=(\d+)", resources))]
    assert min(asks) == 2 * SNAKEMAKE
    asked = {
        re.search(r"cell=(\S+)", text)[1]: int(re.search(r"mem_mb=(\d+)", resources)[1])
        for rule, text, resources in jobs
        if rule == "latency"
    }
    model = of_file("demo/config.json")
    assert asked["fp16"] == jobs_of("cpu").latency("fp16", "transformers", model, prompts=9).mb
    assert len(asked) == 6
    untimed = {rule for rule, _, resources in jobs if "runtime=" not in resources}
    assert untimed <= silent | {"source", "tokens", "mlc_library"}


def test_a_run_of_several_gpus_asks_for_them(checkout: Callable[[], Path]) -> None:
    """Both of its jobs do; and a cluster's node without a card, which reads the config too, refuses nothing."""
    root = checkout()
    engine = 'ENGINES["many"] = Engine(env="torch", loads=("hf",), devices=("cuda",), multi_gpu=True, options=None)\n'
    (root / "rules/engines/many.smk").write_text(engine)
    (root / "scripts/quantmill/engines/many.py").write_text("")
    (root / "study.yaml").write_text(
        "models: {demo: {source: demo}}\nformats: [fp16]\nruns: {two: {engine: many, formats: [fp16], gpus: 2}}\n"
    )
    command = [REPO / ".venv/bin/snakemake", "--dry-run", "--configfile", "study.yaml"]
    cuda = ["--config", "device=cuda", "--resources", "gpu=2"]
    planned = subprocess.run([*command, *cuda], cwd=root, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    jobs = re.findall(r"^rule (\w+):$(.*?)resources: .*?gpu=(\d)", planned.stdout, re.M | re.S)
    assert {rule for rule, text, gpus in jobs if "cell=fp16@two" in text and gpus == "2"} == {"latency", "quality"}
    assert {rule for rule, _, gpus in jobs if gpus == "2"} == {"latency", "quality"}
    node = ["--mode", "remote", "--executor", "local", "--cores", "1", "--target-jobs", "source:model=demo"]
    no_card = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    job = subprocess.run([*command, *node], cwd=root, capture_output=True, text=True, env=no_card)
    assert job.returncode == 0, job.stderr


def test_snakemake_takes_what_jobs_ask_for_it(checkout: Callable[[], Path]) -> None:
    # what it says of itself: a child's usage counts what its parent held when it was started
    command = [sys.executable, "-c", RUN, REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", "--quiet", "all"]
    result = subprocess.run(list(map(str, command)), cwd=checkout(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 0.75 * SNAKEMAKE < int(result.stdout.splitlines()[-1]) * 1024 / MB < SNAKEMAKE


def test_memory_of_a_protocol_whose_windows_are_the_context() -> None:
    model = of_file("config/examples/llama-2-7b.json")

    def mb(protocol: str, context: int | None) -> int:
        jobs = jobs_of("cpu", perplexity=protocol)
        return jobs.score("ct2-int8", "ctranslate2", replace(model, context=context), 1).mb

    # 16 bytes for each position and token of the vocabulary; a context that is not known counts as 2,048
    assert mb("lm-eval-word", 4096) - mb("lm-eval-word", 2048) == pytest.approx(2048 * 32_000 * 16 / 1e6, abs=1)
    assert mb("lm-eval-word", None) == mb("lm-eval-word", 2048) == mb("gptq-2048", 4096)
    assert mb("llamacpp-512", 4096) < mb("gptq-2048", 4096)


def test_a_study_that_was_cleaned_up_is_measured_again(checkout: Callable[[], Path]) -> None:
    root = checkout()
    for name in ("fp16", "mlc-q4f16_1"):  # of which one has no config.json
        (root / "artifacts/demo" / name).mkdir(parents=True)
    shutil.copy(root / "demo/config.json", root / "artifacts/demo/fp16")
    study = "models: {demo: {source: demo}}\nformats: [fp16, mlc-q4f16_1]\ndevice: cpu\nremove_intermediates: true\n"
    (root / "study.yaml").write_text(study)
    command = [REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "2", "--configfile", "study.yaml"]
    command += ["--forcerun", "latency", "--rerun-triggers", "mtime", "--", "artifacts/demo/latency/mlc-q4f16_1.json"]
    result = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    resources = re.search(r"^rule latency:.*?resources: (.*?)$", result.stdout, re.M | re.S)[1]
    asked = jobs_of("cpu").latency("mlc-q4f16_1", ENGINES["mlc-q4f16_1"], of_file("demo/config.json"), prompts=9).mb
    assert f"mem_mb={asked}," in resources


def test_a_limit_of_time_grows_with_the_model(checkout: Callable[[], Path]) -> None:
    root = checkout()
    config = (root / "config/config.yaml").read_text().replace("device: auto", "device: cpu")
    (root / "config/config.yaml").write_text(config)
    demo = json.loads((root / "demo/config.json").read_text())
    text = {"context": 512, "prompts": [{"text": "", "ids": [1] * 20}] * 3}
    (root / "artifacts/demo/tokens").mkdir(parents=True)
    for kind in ("prompts", "evaluation", "calibration"):
        (root / f"artifacts/demo/tokens/{kind}.json").write_text(json.dumps(text))
    found = []
    for blocks in (demo["num_hidden_layers"], 700):
        for name in ("source", "safetensors", "fp16"):
            (root / "artifacts/demo" / name).mkdir(parents=True, exist_ok=True)
            (root / "artifacts/demo" / name / "config.json").write_text(
                json.dumps(demo | {"num_hidden_layers": blocks})
            )
        command = [REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", "report"]
        result = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        jobs = re.findall(r"^rule (\w+):$(.*?)resources: (.*?)$", result.stdout, re.M | re.S)
        times = {rule + (re.findall(r"(?:format|cell)=(\S+)", said) or [""])[-1]: asked for rule, said, asked in jobs}
        found.append(
            {job: int(time[1]) for job, asked in times.items() if (time := re.search(r"runtime=(\d+)", asked))}
        )
    before, after = found
    assert before.keys() == after.keys()
    heavy = {"safetensors", "ct2ct2-int8", "mlcmlc-q4f16_1", "quantizegptq-int4", "latencyfp16", "latencygptq-int4"}
    assert heavy | {"qualityfp16", "noise_floor", "reference_logits", "expected_predictions"} <= before.keys()
    assert all(LEAST <= before[job] <= after[job] for job in before)
    assert all(before[job] < after[job] for job in heavy - {"safetensors", "mlcmlc-q4f16_1"})


def test_a_limit_of_time_is_above_what_was_measured() -> None:
    for row in ROWS:
        jobs = jobs_of(row["device_details"]["device"], calibration={"samples": 16, "sequence_length": 512})
        asked = jobs.build(row["format"], row["engine"], of_row(row), gated=True).minutes
        assert row["artifact"]["build_s"] < 60 * asked / 2
    model = of_row(ROWS[0])
    alone, beside = (jobs_of("cuda", reference_logits=where) for where in ("disk", "recompute"))
    scored = "ct2-int8", "ctranslate2", model, 10**9
    assert beside.score(*scored).minutes > 1.5 * alone.score(*scored).minutes
    assert jobs_of("auto").score(*scored) == alone.score(*scored)
    least, more = (jobs_of("cpu").latency("fp16", "transformers", model, prompts).minutes for prompts in (1, 1000))
    assert least == LEAST < more


SEVEN, ONE, DEMO = "config/examples/llama-2-7b.json", "config/examples/llama-1.1b.json", "demo/config.json"
BUILDS = [  # format, engine, model, device, with the gate: MB of memory without Snakemake, and of disk
    ("ct2-int8", "ctranslate2", SEVEN, "cuda", True, 20177, 20270),
    ("ct2-float32", "ctranslate2", ONE, "cpu", False, 7250 + CUDA_BUILD, 4450),
    ("gptq-int4", "gptqmodel", SEVEN, "cuda", True, 16588, 29248),
    ("awq-int4", "gptqmodel", SEVEN, "cpu", True, 84439 + CUDA_BUILD, 42709),
    ("autogptq-int4", "autogptq", ONE, "cuda", True, 9852, 5468),
    ("mlc-q4f16_1", ENGINES["mlc-q4f16_1"], DEMO, "cpu", True, 514 + CUDA_BUILD, 76),
    ("fp16", "transformers", ONE, "auto", True, 3340, 2250),
]
LATENCIES = [
    ("fp16", "transformers", SEVEN, "cpu", 32474 + CUDA_BUILD),
    ("gptq-int4", "gptqmodel", SEVEN, "cuda", 5583),
    ("autogptq-int4", "autogptq", ONE, "cuda", 2377),
    ("ct2-float32", "ctranslate2", SEVEN, "cuda", 27503),
    ("mlc-q4f16_1", ENGINES["mlc-q4f16_1"], SEVEN, "cuda", 4615),
]


@pytest.mark.parametrize(("format", "engine", "file", "device", "gated", "mb", "disk_mb"), BUILDS)
def test_what_builds_ask_for_stays(
    format: str, engine: str, file: str, device: str, gated: bool, mb: int, disk_mb: int
) -> None:
    asked = jobs_of(device, calibration=SAMPLES).build(format, engine, of_file(file), gated)
    assert (asked.mb, asked.disk_mb) == (pytest.approx(job_mb(mb), abs=2), disk_mb)


@pytest.mark.parametrize(("format", "engine", "file", "device", "mb"), LATENCIES)
def test_what_measurements_ask_for_stays(format: str, engine: str, file: str, device: str, mb: int) -> None:
    protocol = {"repeats": 3, "new_tokens": 200, "processes": 3, "decode": "captured"}
    protocol |= {"prompt_tokens": [512, 2048], "batch_sizes": [1]}
    asked = jobs_of(device, latency=protocol).latency(format, engine, of_file(file), prompts=9)
    assert asked.mb == job_mb(mb)


def test_a_limit_of_time_counts_what_is_read_and_not_what_is_scored() -> None:
    """Windows of 4,096 tokens that go on by 512 read each token eight times; the gate reads whole windows too."""
    model = of_file(SEVEN)
    once, often = (jobs_of("cpu", perplexity=each) for each in ("gptq-2048", "hf-strided"))
    scored = "fp16", "transformers", model, 300_000
    assert often.score(*scored).minutes == pytest.approx(8 * once.score(*scored).minutes, rel=0.05)
    short = replace(model, context=512)
    assert often.score("fp16", "transformers", short, 300_000).minutes < 2.1 * once.score(*scored).minutes
    assert once.expect(model).minutes > once.copy(model).minutes


def test_what_scorings_ask_for_stays() -> None:
    model = of_file(SEVEN)
    assert jobs_of("cpu").score("fp16", "transformers", model, 300_000).minutes == 4316
    assert jobs_of("cpu", perplexity="lm-eval-word").score("ct2-int8", "ctranslate2", model, 1).mb == job_mb(8932)


def test_a_group_of_32_is_larger_than_one_of_128() -> None:
    model, costs = of_file(SEVEN), jobs_of("cuda").formats["gptq-int4"]
    usual, small = (costs.with_parameters({"group_size": size}).size.bytes(model) for size in (128, 32))
    # 2.5 bytes a group; the blocks of Llama-2-7B hold 32 x 202,375,168 weights
    assert small - usual == pytest.approx(2.5 * 32 * 202_375_168 * (1 / 32 - 1 / 128))
    assert costs.with_parameters({"group_size": "auto"}) == costs


def test_a_mixture_is_as_large_as_it_is_asked_to_be() -> None:
    """Bits a weight of the file, or those of a type: 8.5 of Q8_0."""
    model, costs = of_file(SEVEN), jobs_of("cuda").formats["gguf-mixed"]
    of = {size: costs.with_parameters({"size": size}).size.bytes(model) for size in (4, 4.25, "q4_k_m", "q8_0")}
    assert of[4.25] - of[4] == pytest.approx(model.parameters / 32)
    assert of["q8_0"] - of[4] == pytest.approx(model.parameters * 4.5 / 8)
    assert of[4.25] < of["q4_k_m"] < of["q8_0"]
