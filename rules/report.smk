"""All results on one page."""


report: "captions/workflow.rst"


def cells():
    """The rows of the report: each model in each format, and where its results are or why it has none."""
    return [
        {
            "model": name,
            "format": format,
            "engine": FORMATS[format].engine,
            "artifact": f"artifacts/{name}/{format}",
            "latency": f"artifacts/{name}/latency/{format}.json",
            "quality": f"artifacts/{name}/quality/{format}.json" if measured(name) else None,
            "noise_floor": f"artifacts/{name}/quality/noise-floor.json" if measured(name) else None,
            "no_quality": None if measured(name) else "random weights: measured for speed only",
        }
        for name, model in STUDY["models"].items()
        for format in model["formats"]
    ]


localrules:
    study,


rule study:
    output:
        "artifacts/report/study.json",
    params:
        study={"config": STUDY, "cells": cells()},
    script:
        "../scripts/write_study.py"


rule page:
    input:
        program=program("report.py", "scripts/reporting/page.html.j2", "scripts/reporting/results.schema.json"),
        env=environment("tools"),
        study=rules.study.output[0],
        artifacts=artifacts(),
        results=[cell[kind] for cell in cells() for kind in ("latency", "quality", "noise_floor") if cell[kind]],
    output:
        page=report(
            "artifacts/report/index.html",
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
    log:
        "artifacts/logs/report.log",
    params:
        python=python("tools"),
    shell:
        "{params.python:q} {input.program[0]} {input.study} artifacts/report 2> {log}"
