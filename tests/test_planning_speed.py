"""What a plan of many models costs, beside a workflow of Snakemake alone with as many jobs and files."""

import json
import math
import os
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

from conftest import REPO

MODELS = 200
COPIES = ("rtn-int4", "rtn-b", "rtn-c")  # of the page's example, to make up ten formats
FORMATS = ["fp16", "ct2-int8", "ct2-float16", "ct2-float32", "gptq-int4", "awq-int4", "mlc-q4f16_1", *COPIES]
JOBS = (
    MODELS * (6 + 2 * len(FORMATS)) + 3
)  # source, safetensors, library, 3 of tokens; builds, latency; study, page, report
SECONDS = 8  # of CPU, on 2 cores of an AMD EPYC
BARE = f"""
MODELS, FORMATS = {[f"m{number}" for number in range(MODELS)]}, {FORMATS}
TEXTS = expand("artifacts/{{{{model}}}}/tokens/{{text}}.json", text=["prompts", "evaluation"])
BUILDS = dict(ct2="ct2-.*", int4="gptq-int4|awq-int4", mlc="mlc-.*", **{{name: name for name in {COPIES}}})

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
            "artifacts/{{model}}/" + ("fp16" if name == "int4" or "rtn" in name else "safetensors"),
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
    """CPU seconds of a plan, user's and system's, and what it printed."""
    command = [REPO / ".venv/bin/snakemake", "--dry-run", "--cores", "8", "report", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stdout + result.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result.stdout


def test_many_models_cost_what_snakemake_itself_takes(checkout: Callable[[], Path], tmp_path: Path) -> None:
    root = checkout()
    page = (root / "docs/ADDING_A_FORMAT.md").read_text()
    files = dict(re.findall(r"^`([\w./]+)`[^\n]*:\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    (root / "scripts/build_rtn.py").write_text(files["scripts/build_rtn.py"])
    for name in COPIES:
        text = (
            files["rules/formats/rtn.smk"]
            .replace("rtn-int4", name)
            .replace("rule rtn:", f"rule {name.replace('-', '_')}:")
        )
        (root / f"rules/formats/{name}.smk").write_text(text)
    models = {f"m{number}": {"source": {"random": "config/examples/llama-1.1b.json"}} for number in range(MODELS)}
    (root / "study.yaml").write_text(json.dumps({"models": models, "formats": FORMATS}))
    (tmp_path / "Snakefile").write_text(BARE)
    (tmp_path / "shape.json").touch()
    for folder in (root, tmp_path):
        for env in ("tools", "torch", "mlc", "gptqmodel"):  # as if built: one job each, of none of the models
            (folder / "envs" / env).mkdir(parents=True)
            (folder / f"envs/{env}.txt").touch()
            os.utime(folder / f"envs/{env}.txt", (0, 0))
    ours, bare = (root, "--configfile", "study.yaml"), (tmp_path,)
    for which in (ours, bare):
        _, printed = plan(*which, "--quiet", "rules")
        assert re.findall(r"^total +(\d+)$", printed, re.MULTILINE)[-1] == str(JOBS)
    best = [math.inf, math.inf]
    for _ in range(8):  # the least of some: what else runs here makes a processor slower too
        best = [min(least, plan(*which, "--quiet")[0]) for least, which in zip(best, (ours, bare), strict=True)]
        if fits := best[0] < max(SECONDS, 1.2 * best[1]):
            break
    print(f"{JOBS} jobs: {best[0]:.1f} CPU-seconds, Snakemake alone {best[1]:.1f}")
    assert fits
