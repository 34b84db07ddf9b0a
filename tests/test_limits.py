"""What jobs ask a scheduler for: memory and time, by a model's shape, against what recorded runs took."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conftest import REPO, RUN
from recorded_rows import ROWS, of_row

from planning import memory, minutes, shape


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
    assert min(asks) == 2 * memory.SNAKEMAKE
    model = shape.of(json.loads((root / "demo/config.json").read_text()))
    asked = {
        re.search(r"format=(\S+)", text)[1]: int(re.search(r"mem_mb=(\d+)", resources)[1])
        for rule, text, resources in jobs
        if rule == "latency"
    }
    assert asked["fp16"] == memory.SNAKEMAKE + memory.latency_mb("fp16", model, "cpu")
    assert len(asked) == 6
    untimed = {rule for rule, _, resources in jobs if "runtime=" not in resources}
    assert untimed <= silent | {"source", "tokens", "mlc_library"}


def test_snakemake_takes_what_jobs_ask_for_it(checkout: Callable[[], Path]) -> None:
    # what it says of itself: a child's usage counts what its parent held when it was started
    command = [sys.executable, "-c", RUN, REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", "--quiet", "all"]
    result = subprocess.run(list(map(str, command)), cwd=checkout(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 0.75 * memory.SNAKEMAKE < int(result.stdout.splitlines()[-1]) * 1024 / memory.MB < memory.SNAKEMAKE


def test_memory_of_a_protocol_whose_windows_are_the_context() -> None:
    model = shape.of(json.loads((REPO / "config/examples/llama-2-7b.json").read_text()))
    unknown, longest = replace(model, context=None), memory.window("lm-eval-word")
    asked = [memory.engine_mb("ct2-int8", each, "cpu", longest) for each in (model, unknown)]
    windows = [memory.engine_mb("ct2-int8", replace(model, context=size), "cpu", size) for size in (4096, 2048)]
    assert asked == windows  # a context that is not known counts as 2,048, as scoring takes it
    assert memory.engine_mb("ct2-int8", model, "cpu", memory.window("llamacpp-512")) < windows[1]


def test_a_study_that_was_cleaned_up_is_measured_again(checkout: Callable[[], Path]) -> None:
    root = checkout()
    for name in ("fp16", "mlc-q4f16_1"):  # of which one has no config.json
        (root / "artifacts/demo" / name).mkdir(parents=True)
    shutil.copy(root / "demo/config.json", root / "artifacts/demo/fp16")
    study = "models: {demo: {source: demo}}\nformats: [fp16, mlc-q4f16_1]\ndevice: cpu\nclean: true\n"
    (root / "study.yaml").write_text(study)
    command = [REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "2", "--configfile", "study.yaml"]
    command += ["--forcerun", "latency", "--rerun-triggers", "mtime", "--", "artifacts/demo/latency/mlc-q4f16_1.json"]
    result = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    model = shape.of(json.loads((root / "demo/config.json").read_text()))
    resources = re.search(r"^rule latency:.*?resources: (.*?)$", result.stdout, re.M | re.S)[1]
    asked = memory.SNAKEMAKE + memory.latency_mb("mlc-q4f16_1", model, "cpu")
    assert f"mem_mb={asked}," in resources


def test_a_limit_of_time_grows_with_the_model(checkout: Callable[[], Path]) -> None:
    root = checkout()
    config = (root / "config/config.yaml").read_text().replace("device: auto", "device: cpu")
    (root / "config/config.yaml").write_text(config)
    demo = json.loads((root / "demo/config.json").read_text())
    text = {"context": 512, "prompts": [{"ids": [1] * 20}] * 3}
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
        times = {rule + (re.findall(r"format=(\S+)", said) or [""])[-1]: asked for rule, said, asked in jobs}
        found.append(
            {job: int(time[1]) for job, asked in times.items() if (time := re.search(r"runtime=(\d+)", asked))}
        )
    before, after = found
    assert before.keys() == after.keys()
    heavy = {"safetensors", "ct2ct2-int8", "mlcmlc-q4f16_1", "quantizegptq-int4", "latencyfp16", "latencygptq-int4"}
    assert heavy | {"qualityfp16", "noise_floor", "reference_logits", "expected_predictions"} <= before.keys()
    assert all(minutes.LEAST <= before[job] <= after[job] for job in before)
    assert all(before[job] < after[job] for job in heavy - {"safetensors", "mlcmlc-q4f16_1"})


def test_a_limit_of_time_is_above_what_was_measured() -> None:
    calibration = {"samples": 16, "sequence_length": 512}
    for row in ROWS:
        model, device = of_row(row), row["device_details"]["device"]
        asked = minutes.build(row["format"], model, device, True, calibration)
        assert row["artifact"]["build_seconds"] < 60 * asked / 2
    model = of_row(ROWS[0])
    assert minutes.scoring(model, "cuda", 10**9, 2) > 1.5 * minutes.scoring(model, "cuda", 10**9)
    assert minutes.scoring(model, "auto", 10**9) == minutes.scoring(model, "cuda", 10**9)
    protocol = {
        "repeats": 3,
        "new_tokens": 200,
        "processes": 3,
        "decode": "eager",
        "prompt_tokens": [],
        "batch_sizes": [],
    }
    least, more = (minutes.latency("fp16", model, "cpu", protocol, prompts) for prompts in (1, 1000))
    assert least == minutes.LEAST < more


def test_the_limits_that_the_documentation_shows_are_those_of_today() -> None:
    page = (REPO / "docs/PERFORMANCE.md").read_text().partition("## Time of jobs")[2].partition("## Planning")[0]
    shown = {
        line.split("|")[1].strip().split(" ")[0]: [int(each) for each in re.findall(r"\d+", line.split("|")[2])]
        for line in page.splitlines()
        if re.match(r"\| [^|]+ \| \d", line)
    }
    named = ("demo/config.json", "config/examples/llama-1.1b.json", "config/examples/llama-2-7b.json")
    models = [shape.of(json.loads((REPO / name).read_text())) for name in named]
    samples = {"samples": 128, "sequence_length": 2048}
    protocol = {"repeats": 3, "new_tokens": 200, "processes": 3, "prompt_tokens": [512, 2048], "batch_sizes": [1]}
    protocol["decode"] = "captured"
    assert shown == {
        "ct2-int8": [minutes.build("ct2-int8", model, "cuda", True, samples) for model in models],
        "gptq-int4": [minutes.build(name, models[-1], "cuda", True, samples) for name in ("gptq-int4", "awq-int4")],
        "latency": [minutes.latency(name, models[-1], "cuda", protocol, 9) for name in ("fp16", "gptq-int4")],
        "scoring": [minutes.scoring(model, "cuda", 300_000) for model in models],
    }


GPU = re.compile(r"\| (\S+?)(?: measured)?, GPU(?:, (\d+) x ([\d,]+))? \| ([^|]+) \| ([^|]+) \| ([^|]+) \|")
FILES = {"demo": "demo/config.json", "1.1B": "config/examples/llama-1.1b.json", "7B": "config/examples/llama-2-7b.json"}


def test_the_memory_that_the_documentation_shows_is_that_of_today() -> None:
    """Of jobs with a GPU: what they ask for by the code, what they took by results/h200."""
    page = (REPO / "docs/PERFORMANCE.md").read_text().partition("## Memory of jobs")[2].partition("## Time of jobs")[0]
    on_gpu = {(row["model"], row["format"]): row for row in ROWS if row["device_details"]["device"] == "cuda"}
    lines = [line for line in page.splitlines() if GPU.fullmatch(line)]
    assert len(lines) == 12
    for line in lines:
        name, samples, length, models, *figures = GPU.fullmatch(line).groups()
        asks, took = ([int(each.replace(",", "")) for each in figure.split(" / ")] for figure in figures)
        for model, asked, peak in zip(models.split(" / "), asks, took, strict=True):
            of_model = shape.of(json.loads((REPO / FILES[model]).read_text()))
            folder = model if model == "demo" else f"llama-{model.lower()}"
            if " measured" in line:
                result = json.loads((REPO / f"results/h200/{folder}/latency/{name}.json").read_text())
                ways = (result, *result["other_modes"])
                assert asked == memory.engine_mb(name, of_model, "cuda"), line
                assert peak == round(max(way["memory_bytes"]["resident"] for way in ways) / 1e6), line
                continue
            if samples:
                calibration = {"samples": int(samples), "sequence_length": int(length.replace(",", ""))}
                assert asked == memory.quantizer_mb(of_model, name, calibration, "cuda"), line
            else:
                assert asked == memory.build_mb(name, of_model, {}, "cuda", gated=False), line
            built = {"gptqmodel": "gptq-int4", "autoawq": "awq-int4"}.get(name, name)
            assert peak == round(on_gpu[folder, built]["artifact"]["peak_memory_bytes"] / 1e6), line
