"""Memory and time that jobs request from a scheduler, by a model's shape."""

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
from recorded_rows import ENGINES, ROWS, device_of, jobs_of, of_file, of_row

from quantmill.plan.jobs import LEAST, SMALL, SNAKEMAKE, Resources, job_mb
from quantmill.plan.resources import H200, MB, Machine


def write_tokens(root: Path, prompts: int) -> None:
    """Token ids of the demo, as far as jobs ask by them."""
    text = {"context": 512, "prompts": [{"text": "", "ids": [1] * 20}] * prompts}
    (root / "artifacts/demo/tokens").mkdir(parents=True)
    for kind in ("prompts", "evaluation", "calibration"):
        (root / f"artifacts/demo/tokens/{kind}.json").write_text(json.dumps(text))


def test_jobs_say_what_they_take(checkout: Callable[[], Path]) -> None:
    root = checkout()
    command = [REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", "report"]
    fresh = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    assert fresh.returncode == 0, fresh.stderr
    assert "mem_mb=<TBD>" in fresh.stdout  # no model is there yet
    for name in ("source", "safetensors", "fp16"):
        (root / "artifacts/demo" / name).mkdir(parents=True)
        shutil.copy(root / "demo/config.json", root / "artifacts/demo" / name)
    write_tokens(root, 9)
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


def test_a_build_chooses_by_the_memory_of_a_gpu() -> None:
    """Of a 7B, 128 samples of 2,048 tokens: gptqmodel keeps 4 bytes of each token's 4,096 numbers, 4.3 GB."""
    model, kept = of_file("config/examples/llama-2-7b.json"), 128 * 2048 * 4096 * 4 / MB
    calibration = {"samples": 128, "sequence_length": 2048}

    def build(device: str, machine: Machine | None = None, format: str = "gptq-int4", **words: float) -> Resources:
        jobs = jobs_of(device, machine, calibration=calibration, quantizers={"gpus": 1} | words)
        return jobs.build(format, ENGINES[format], model, gated=False)

    assert build("cpu").gpu_mb == 0
    free, limited, unknown = build("cuda", H200), build("cuda", H200, gpu_memory_gb=6), build("cuda")
    assert free.gpu_mb - limited.gpu_mb == pytest.approx(kept, abs=1)
    assert limited.gpu_mb < 6000 < free.gpu_mb
    assert limited.mb - free.mb == pytest.approx(kept, abs=1)
    assert build("cuda", replace(H200, gpu_memory=6 * 10**9)) == limited  # of a GPU without more
    assert unknown.mb == limited.mb  # which it may turn out to need
    assert free.gpu_mb - build("cuda", H200, gpus=2).gpu_mb == pytest.approx(kept / 2, abs=1)
    whole, layers = (build("cuda", H200, "ct-w4a16", **words) for words in ({}, {"gpu_memory_gb": 6}))
    assert whole.gpu_mb > 2 * model.parameters / MB > 6000 > layers.gpu_mb
    assert build("cuda", H200, "bnb-nf4").gpu_mb == 0  # which has no choice


def test_a_program_gets_the_gpus_that_it_can_use(checkout: Callable[[], Path]) -> None:
    root = checkout()
    study = "models: {demo: {source: demo}}\nformats: [fp16, gptq-int4, awq-int4, ct-fp8, ct-w8a8]\ndevice: cuda\n"
    (root / "study.yaml").write_text(study + "quantizers: {gpus: 2, gpu_memory_gb: 6}\n")
    command = [REPO / ".venv/bin/snakemake", "--dry-run", "--printshellcmds", "--configfile", "study.yaml"]
    planned = subprocess.run([*command, "--resources", "gpu=2"], cwd=root, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    jobs = re.findall(r"^rule artifact:$.*?resources: .*?gpu=(\d).*?build\.(\w+) (.*?)$", planned.stdout, re.M | re.S)
    asked = {re.search(r"--format=(\S+)", words)[1]: (gpus, words) for gpus, _, words in jobs}
    flags = {name: re.findall(r"--gpu\S+", words) for name, (_, words) in asked.items() if name != "fp16"}
    both, one = ["--gpus=2", "--gpu-memory-gb=6.0"], ["--gpu-memory-gb=6.0"]
    assert flags == {"gptq-int4": both, "ct-w8a8": both, "ct-fp8": one, "awq-int4": []}
    assert {name for name, (gpus, _) in asked.items() if gpus == "2"} == {"gptq-int4", "ct-w8a8"}


def test_snakemake_takes_what_jobs_ask_for_it(checkout: Callable[[], Path]) -> None:
    # what it says of itself: a child's usage counts what its parent held when it was started
    command = [sys.executable, "-c", RUN, REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", "--quiet", "all"]
    result = subprocess.run(list(map(str, command)), cwd=checkout(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 0.75 * SNAKEMAKE < int(result.stdout.splitlines()[-1]) * 1024 / MB < SNAKEMAKE


def test_a_job_that_failed_asks_for_more_memory(checkout: Callable[[], Path]) -> None:
    root = checkout()
    rule = """
rule greedy:
    output: "artifacts/greedy"
    resources: mem_mb=memory(300)
    shell: "echo {resources.mem_mb} >> asked; [ {resources.mem_mb} = 920 ] && touch {output}"
"""
    (root / "rules/formats/greedy.smk").write_text(rule)
    command = [REPO / ".venv/bin/snakemake", "--cores", "1", "--retries", "1", "artifacts/greedy"]
    result = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (root / "asked").read_text().split() == ["460", "920"]


def test_memory_of_a_protocol_whose_windows_are_the_context() -> None:
    model = of_file("config/examples/llama-2-7b.json")

    def mb(protocol: str, context: int | None) -> int:
        jobs = jobs_of("cpu", perplexity=protocol)
        return jobs.score("ct2-int8", "ctranslate2", replace(model, context=context), 1).mb

    # 16 bytes for each position and token of the vocabulary; a context that is not known counts as 2,048
    assert mb("lm-eval-word", 4096) - mb("lm-eval-word", 2048) == pytest.approx(2048 * 32_000 * 16 / 1e6, abs=1)
    assert mb("lm-eval-word", None) == mb("lm-eval-word", 2048) == mb("gptq-2048", 4096)
    assert mb("llamacpp-512", 4096) < mb("gptq-2048", 4096)


def test_memory_block_by_block_is_the_same_at_any_depth(checkout: Callable[[], Path]) -> None:
    model = of_file(SEVEN)
    deep = replace(model, layers=100, parameters=100 * model.block + model.embeddings)
    jobs = jobs_of("cpu", stream=True)
    for job in (
        lambda each: jobs.score("fp16", "transformers", each, 1),
        lambda each: jobs.build("fp16", "transformers", each, gated=True),
        jobs.expect,
    ):
        assert job(model).mb == job(deep).mb < 5500  # 4 bytes of 13.5 GB / 2 are 27 GB
    assert jobs.latency("fp16", "transformers", model, 1).mb > 27_000
    assert jobs.score("ct2-int8", "ctranslate2", model, 1) == jobs_of("cpu").score("ct2-int8", "ctranslate2", model, 1)

    root = checkout()
    (root / "study.yaml").write_text("models: {demo: {source: demo}}\nformats: [fp16, ct2-int8]\n")
    command = [REPO / ".venv/bin/snakemake", "-n", "-p", "--configfile", "study.yaml"]
    for more, asked in ([], set()), (["--config", "stream=True"], {"--stream", "--gate-stream"}):
        result = subprocess.run([*command, *more], cwd=root, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        scored = re.findall(r"scripts/quantmill (?:gate.expected|quality.measure) .*", result.stdout)
        built = re.findall(r"scripts/quantmill build\.\w+ .*", result.stdout)
        assert [len(scored), len(built)] == [4, 2]
        assert {word for line in (*scored, *built) for word in line.split() if word.endswith("-stream")} == asked
        assert all(("--stream" in line) == bool(asked) for line in scored)


def test_a_study_that_was_cleaned_up_is_measured_again(checkout: Callable[[], Path]) -> None:
    root = checkout()
    for name in ("fp16", "mlc-q4f16_1"):  # of which one has no config.json
        (root / "artifacts/demo" / name).mkdir(parents=True)
    shutil.copy(root / "demo/config.json", root / "artifacts/demo/fp16")
    write_tokens(root, 9)
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
    write_tokens(root, 3)
    found = []
    for blocks in (demo["num_hidden_layers"], 7000):
        for name in ("source", "safetensors", "fp16"):
            (root / "artifacts/demo" / name).mkdir(parents=True, exist_ok=True)
            (root / "artifacts/demo" / name / "config.json").write_text(
                json.dumps(demo | {"num_hidden_layers": blocks})
            )
        command = [REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", "report"]
        result = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        jobs = re.findall(r"^rule (\w+):$(.*?)resources: (.*?)$", result.stdout, re.M | re.S)
        times = {rule + (re.findall(r"(?:artifact|cell)=(\S+)", said) or [""])[-1]: asked for rule, said, asked in jobs}
        found.append(
            {job: int(time[1]) for job, asked in times.items() if (time := re.search(r"runtime=(\d+)", asked))}
        )
    before, after = found
    assert before.keys() == after.keys()
    builds = {f"artifact{name}" for name in ("ct2-int8", "mlc-q4f16_1", "gptq-int4")}
    heavy = {"safetensors", *builds, "latencyfp16", "latencygptq-int4"}
    assert heavy | {"noise_floor", "reference", "expected_predictions"} <= before.keys()
    assert all(LEAST <= before[job] <= after[job] for job in before)
    assert all(before[job] < after[job] for job in heavy - {"safetensors", "artifactmlc-q4f16_1"})


def test_a_limit_of_time_is_above_what_was_measured() -> None:
    for row in ROWS:
        made = {name: row["artifact"]["parameters"].get(name, 1) for name in ("samples", "sequence_length")}
        jobs = jobs_of(device_of(row), calibration=made)
        asked = jobs.build(row["format"], row["engine"], of_row(row), gated=True).minutes
        assert row["artifact"]["build_s"] < 60 * asked / 2
    model = of_row(ROWS[0])
    scored = "ct2-int8", "ctranslate2", of_file(SEVEN), 10**9
    logits, states = (jobs_of("cuda", reference_logits=keep).score(*scored) for keep in ("logits", "auto"))
    assert logits.minutes < states.minutes < 1.1 * logits.minutes  # a product of the head more
    assert states.mb - logits.mb == 2 * 32_000 * 4096 // MB
    assert jobs_of("auto", reference_logits="auto").score(*scored) == states
    least, more = (jobs_of("cpu").latency("fp16", "transformers", model, prompts).minutes for prompts in (1, 1000))
    assert least == LEAST < more


SEVEN = "config/examples/llama-2-7b.json"


def test_a_gated_build_also_holds_its_engine() -> None:
    """The gate has transformers run the same weights, then the engine. Disk holds the copies and these weights."""
    few = {"samples": 3, "sequence_length": 2048}
    model, jobs = of_file(SEVEN), jobs_of("cuda", calibration=few)
    alone, gated = (jobs.build("gptq-int4", "gptqmodel", model, gated) for gated in (False, True))
    float16 = 2 * 6738.4  # MB
    assert alone.mb < gated.mb == pytest.approx(job_mb(2450 + 1700 + 5000), abs=2)
    assert gated.disk_mb - alone.disk_mb == pytest.approx(float16, abs=1)
    assert alone.disk_mb == pytest.approx(4 * (3894 + SMALL), abs=8)  # the artifact, and three copies
    assert gated.seconds > alone.seconds + jobs.expect(model).seconds
    assert jobs_of("auto", calibration=few).build("gptq-int4", "gptqmodel", model, True) == gated


def test_a_limit_of_time_counts_tokens_read() -> None:
    """Windows of 4,096 tokens that go on by 512 read each token eight times; the gate reads whole windows too."""
    model = of_file(SEVEN)
    once, often = (jobs_of("cpu", perplexity=each) for each in ("gptq-2048", "hf-strided"))
    scored = "fp16", "transformers", model, 300_000
    assert often.score(*scored).minutes == pytest.approx(8 * once.score(*scored).minutes, rel=0.05)
    short = replace(model, context=512)
    assert often.score("fp16", "transformers", short, 300_000).minutes < 2.1 * once.score(*scored).minutes
    assert once.expect(model).minutes > once.copy(model).minutes


def test_smaller_groups_take_more_bytes() -> None:
    model, costs = of_file(SEVEN), jobs_of("cuda").formats["gptq-int4"]
    usual, small = (costs.with_parameters({"group_size": size}).size.bytes(model) for size in (128, 32))
    # 2.5 bytes a group; the blocks of Llama-2-7B hold 32 x 202,375,168 weights
    assert small - usual == pytest.approx(2.5 * 32 * 202_375_168 * (1 / 32 - 1 / 128))
    assert costs.with_parameters({"group_size": "auto"}) == costs


def test_a_mixture_has_the_requested_size() -> None:
    """Bits a weight of the file, or those of a type: 8.5 of Q8_0."""
    model, costs = of_file(SEVEN), jobs_of("cuda").formats["gguf-mixed"]
    of = {size: costs.with_parameters({"size": size}).size.bytes(model) for size in (4, 4.25, "q4_k_m", "q8_0")}
    assert of[4.25] - of[4] == pytest.approx(model.parameters / 32)
    assert of["q8_0"] - of[4] == pytest.approx(model.parameters * 4.5 / 8)
    assert of[4.25] < of["q4_k_m"] < of["q8_0"]
