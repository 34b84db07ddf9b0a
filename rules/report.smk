"""All results on one page."""

import base64
import os
import shlex
import shutil
import subprocess
import zlib

from quantmill.common.program import run_child
from quantmill.report import summary
from quantmill.report.live_page import LivePage
from snakemake.logging import logger

RANDOM = "random weights: measured for speed only"
PAGE_FILES = list((PACKAGE / "report/page_files").glob("*"))


report: "captions/workflow.rst"


def configfiles():
    """Return the options that name this study; none for the demo."""
    files = [shlex.quote(os.path.relpath(file)) for file in workflow.configfiles]
    return f"--configfile {' '.join(files)} " if workflow.overwrite_configfiles else ""


def logs(cell):
    """Return the logs of all jobs that each result of a cell depends on, upstream first."""
    folder, format = f"artifacts/logs/{cell.model}", FORMATS.get(format_of(cell.artifact))
    made = ["source", "tensors", "safetensors", STUDY["reference"], "expected-predictions"]
    made += ["tokens-prompts", "tokens-evaluation"]
    made += ["fp16"] if format and format.source == "fp16" else []
    made += ["tokens-calibration"] if format and format.calibrated else []
    envs = {"tools", ENGINES[REFERENCE_ENGINE].env, ENGINES[cell.engine].env, *([format.env] if format else [])}
    built = [f"artifacts/logs/envs/{env}.log" for env in sorted(envs - INTERPRETERS.keys())]
    compiled = [Path(file).name for env in sorted(envs) for file in COMPILED.get(env, ())]
    built += [f"artifacts/logs/libraries/{name}.log" for name in compiled]
    built += [f"{folder}/{name}.log" for name in (*made, *(format.logs if format else ()), cell.artifact)]
    scored = [*built, f"{folder}/quality-{STUDY['reference']}.log"]
    documents = [f"artifacts/logs/envs/{HARNESS}.log"] if python(HARNESS) != INTERPRETERS.get(HARNESS) else []
    documents += [f"artifacts/logs/texts/tasks/{name}.log" for name in TASKS["names"]]
    return {
        "artifact": built,
        "latency": [*built, f"{folder}/latency-{cell.name}.log"],
        "quality": [*scored, f"{folder}/quality-{cell.name}.log"],
        "noise_floor": [*scored, f"{folder}/noise-floor.log"],
        "loads": [*built, f"{folder}/tokens-burst.log", f"{folder}/loads-{cell.name}.log"],
        "tasks": [*built, *documents, f"{folder}/tasks-{cell.name}.log"],
    }


def absent(cell):
    """Return why parts of a row are not measured."""
    quality = {} if has_quality(cell.model) else dict.fromkeys(("quality", "noise_floor", "tasks"), RANDOM)
    return quality | ({} if has_speed(cell) else {"latency": ENGINES[cell.engine].no_speed})


def rows():
    """Return the rows of the report: paths of each cell's results, or why there are none."""
    return [
        {
            "model": cell.model,
            "format": cell.artifact,
            "run": cell.run,
            "engine": cell.engine,
            "options": cell.options,
            "gpus": cell.gpus,
            "prebuilt": cell.prebuilt,
            "artifact": f"artifacts/{cell.model}/{cell.artifact}",
            "latency": f"artifacts/{cell.model}/latency/{cell.name}.json" if has_speed(cell) else None,
            "quality": f"artifacts/{cell.model}/quality/{cell.name}.json" if has_quality(cell.model) else None,
            "loads": f"artifacts/{cell.model}/loads/{cell.name}.json" if has_loads(cell) else None,
            "tasks": f"artifacts/{cell.model}/tasks/{cell.name}.json" if has_tasks(cell) else None,
            "noise_floor": f"artifacts/{cell.model}/quality/noise-floor.json" if has_quality(cell.model) else None,
            "absent": absent(cell),
            "evaluation": f"artifacts/{cell.model}/tokens/evaluation.json",
            "prompts": f"artifacts/{cell.model}/tokens/prompts.json",
            "logs": logs(cell),
        }
        for cell in CELLS.values()
    ]


def packed(content):
    """Return the input of report.write_study: JSON, compressed, in base64."""
    return base64.b64encode(zlib.compress(json.dumps(content, indent=2).encode(), 9)).decode()


localrules:
    study,


rule study:
    output:
        "artifacts/report/study.json",
    priority: 1000
    params:
        program=program("report.write_study"),
        # one word without braces, which Snakemake would fill in; the kernel allows 128 KiB
        study=packed(
            {
                "config": STUDY,
                "cells": rows(),
                "options": f"--cores 8 {configfiles()}".strip(),  # of Snakemake, for the commands that the page shows
            }
        ),
    shell:
        "echo {params.study:q} | {sys.executable:q} {params.program.command:q} {output:q}"


rule page:
    input:
        env=environment("tools"),
        study="artifacts/report/study.json",  # rules.study.output would be compared with every result, in quadratic time
        artifacts=artifacts(),
        results=[
            cell[kind]
            for cell in rows()
            for kind in ("latency", "quality", "noise_floor", "loads", "tasks")
            if cell[kind]
        ],
    output:
        **({"loads": "artifacts/report/loads.csv"} if any(map(has_loads, CELLS.values())) else {}),
        # A browser reloads the page of the first rows: without update(), Snakemake would remove it first.
        page=report(
            update("artifacts/report/index.html"),
            caption="captions/page.rst",
            category="Report",
            labels={"figure": "the page"},
        ),
        csv=report(
            "artifacts/report/results.csv",
            caption="captions/csv.rst",
            category="Tables",
            labels={"figure": "every row"},
        ),
        json="artifacts/report/results.json",
        parquet="artifacts/report/results.parquet",
        svg=report(
            "artifacts/report/quality-speed.svg",
            caption="captions/svg.rst",
            category="Figures",
            labels={"figure": "quality over speed"},
        ),
        sizes=report(
            "artifacts/report/quality-size.svg",
            caption="captions/sizes.rst",
            category="Figures",
            labels={"figure": "quality over size"},
        ),
        png="artifacts/report/quality-speed.png",
    log:
        "artifacts/logs/report.log",
    params:
        program=program("report.write", *PAGE_FILES),
        python=python("tools"),
        folder=lambda wc, output: Path(output.page).parent,
    shell:
        "{params.python:q} {params.program.command:q} {input.study:q} {params.folder:q} 2> {log:q}"


def can_report():
    """Return whether a partial page can be made: study.json is this study's, and the tools are built."""
    study = Path(rules.study.output[0])
    return (
        study.exists()
        and shutil.which(python("tools")) is not None
        and json.loads(study.read_text())["config"] == json.loads(json.dumps(STUDY))
    )


def report_command(option):
    """Return the command that makes a partial page. Its files are older than their inputs, so that Snakemake still makes
    the page."""
    study = Path(rules.study.output[0])
    return [python("tools"), *program("report.write").command, option, study, study.parent]


def files_to_come():
    """List the files that this run has still to make."""
    return [str(file) for job in workflow.dag.needrun_jobs() for file in job.output]


def asked_for_page(**finished):
    """Return whether this run makes the page, or with exclude_finished=False has made it."""
    return any(job.rule.name == "page" for job in workflow.dag.needrun_jobs(**finished))


def report_while_running():
    """Make the page whenever a row is complete. Only if all jobs run on this machine: otherwise a measurement may be
    running."""
    if not asked_for_page() or workflow.touch:
        return
    if workflow.local_exec:
        log = Path("artifacts/logs/live-page.log")
        logger.addHandler(LivePage(report_command("--running"), can_report, rows(), files_to_come(), log))
    else:
        logger.info("The page is made once at the end, since jobs run on other machines.")


def report_the_rest():
    """Make the report of a failed run, with the reasons for missing cells, if the run was to make it."""
    for page in [each for each in logger.handlers if isinstance(each, LivePage)]:
        page.wait()  # two cannot write the same files
    if asked_for_page() and can_report():
        told = {"stdin": json.dumps(files_to_come()), "stdout": subprocess.PIPE, "env": surroundings.clear(os.environ)}
        made = run_child(report_command("--incomplete"), **told)
        said = made.stdout if not made.returncode else made.stderr.strip().split("\n")[-1]
        print(said.strip(), file=sys.stderr)


def summarise_report():
    """Print the findings in the terminal if this run made the page."""
    if asked_for_page(exclude_finished=False) and not workflow.touch:
        results = json.loads(Path(rules.page.output.json).read_text())
        logger.info(summary.text(results, rules.page.output.page), extra={"summary": True})
