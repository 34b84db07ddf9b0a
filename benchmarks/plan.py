#!/usr/bin/env python3
"""Time the plan of many models against a bare Snakemake workflow with as many jobs and files.

    .venv/bin/python benchmarks/plan.py [--models 200] [--runs 3]

Makes a study of random weights in ten formats and plans it (--dry-run) in a clone of the last commit, in turn with a
workflow of bare rules, without parameters, resources or logs. Prints CPU-seconds of both, user plus system, minimum of
RUNS.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
VARIANTS = {
    "gptq-32": {"format": "gptq-int4", "group_size": 32},
    "gptq-64": {"format": "gptq-int4", "group_size": 64},
    "awq-64": {"format": "awq-int4", "q_group_size": 64},
}
BUILT = ("fp16", "ct2-int8", "ct2-float16", "ct2-float32", "gptq-int4", "awq-int4", "mlc-q4f16_1")
FORMATS = [*BUILT, *VARIANTS]
BARE = f"""
MODELS, FORMATS = [f"m{{number}}" for number in range(int(config["models"]))], {FORMATS}
TEXTS = expand("artifacts/{{{{model}}}}/tokens/{{text}}.json", text=["prompts", "evaluation"])
BUILDS = dict(ct2="ct2-.*", int4="(gptq|awq)-.*", mlc="mlc-.*")

wildcard_constraints:
    model="[a-z0-9]+",

rule report:
    input: "artifacts/report/index.html"

rule environment:
    input: "envs/{{env}}.txt"
    output: directory("envs/{{env}}")
    shell: "touch {{output}}"

rule study:
    output: "artifacts/report/study.json"
    shell: "touch {{output}}"

rule page:
    input:
        "envs/tools",
        "artifacts/report/study.json",
        expand("artifacts/{{model}}/{{format}}", model=MODELS, format=FORMATS),
        expand("artifacts/{{model}}/latency/{{format}}.json", model=MODELS, format=FORMATS),
    output: "artifacts/report/index.html"
    shell: "touch {{output}}"

rule source:
    input: "envs/torch", "shape.json"
    output: directory("artifacts/{{model}}/source")
    shell: "touch {{output}}"

rule safetensors:
    input: "envs/tools", "artifacts/{{model}}/source"
    output: directory("artifacts/{{model}}/safetensors")
    shell: "touch {{output}}"

rule tokens:
    input: "envs/torch", "shape.json", "artifacts/{{model}}/safetensors"
    output: "artifacts/{{model}}/tokens/{{text}}.json"
    shell: "touch {{output}}"

rule fp16:
    input: "envs/tools", "artifacts/{{model}}/safetensors"
    output: directory("artifacts/{{model}}/fp16")
    shell: "touch {{output}}"

rule mlc_library:
    input: "envs/mlc", "artifacts/{{model}}/safetensors"
    output: "artifacts/{{model}}/mlc/model_lib.so"
    shell: "touch {{output}}"

for name, pattern in BUILDS.items():
    rule:
        name: name
        input:
            "envs/torch",
            "artifacts/{{model}}/" + ("fp16" if name == "int4" else "safetensors"),
            ["artifacts/{{model}}/tokens/calibration.json", TEXTS[1]] if name == "int4" else [],
            "artifacts/{{model}}/mlc/model_lib.so" if name == "mlc" else [],
        output: directory("artifacts/{{model}}/{{format}}")
        wildcard_constraints: format=pattern
        shell: "touch {{output}}"

rule latency:
    input: "envs/torch", "artifacts/{{model}}/{{format}}", TEXTS
    output: "artifacts/{{model}}/latency/{{format}}.json"
    shell: "touch {{output}}"
"""


def plan(root: Path, *options: str) -> tuple[float, str]:
    """Make a plan; return its CPU-seconds, user plus system, and its output."""
    command = [REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", *options, "--", "report"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode:
        sys.exit(f"error: {result.stdout}{result.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    # per model: source, safetensors, library, 3 of tokens, builds and latency; then study, page, report
    jobs = options.models * (6 + 2 * len(FORMATS)) + 3
    with tempfile.TemporaryDirectory() as folder:
        ours, bare = Path(folder, "ours"), Path(folder, "bare")
        subprocess.run(["git", "clone", "--quiet", REPO, ours], check=True)
        bare.mkdir()
        models = {
            f"m{each}": {"source": {"random": "config/examples/llama-1.1b.json"}} for each in range(options.models)
        }
        study = {"models": models, "formats": BUILT, "variants": VARIANTS}
        (ours / "study.yaml").write_text(json.dumps(study))
        (bare / "Snakefile").write_text(BARE)
        (bare / "shape.json").touch()
        for root in (ours, bare):
            for env in ("tools", "torch", "mlc", "gptqmodel"):  # as if built: one job each, of none of the models
                (root / "envs" / env).mkdir(parents=True)
                (root / f"envs/{env}.txt").touch()
                os.utime(root / f"envs/{env}.txt", (0, 0))
        both = (ours, "--configfile", "study.yaml"), (bare, "--config", f"models={options.models}")
        for which in both:
            _, printed = plan(*which, "--quiet", "rules")
            total = re.findall(r"^total +(\d+)$", printed, re.MULTILINE)[-1]
            if total != str(jobs):
                sys.exit(f"error: {which[0].name}: {total} jobs instead of {jobs}")
        best = [min(plan(*which, "--quiet")[0] for _ in range(options.runs)) for which in both]
    print(f"{jobs} jobs: {best[0]:.1f} CPU-seconds, Snakemake alone {best[1]:.1f}")


if __name__ == "__main__":
    main()
