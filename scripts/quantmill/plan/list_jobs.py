"""Print a study as JSON, for plan.show and deploy.serve_command. Runs in Snakemake's own Python.

It has the jobs that are left, the config with its defaults, the rows of the report, the layouts that servers load, and
the figures of registered formats and engines.

    .venv/bin/python scripts/quantmill plan.list_jobs [CONFIG]
"""

import contextlib
import io
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snakemake.api import SnakemakeApi
from snakemake.settings.enums import Quietness
from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, ResourceSettings
from snakemake_interface_common.exceptions import WorkflowError

from quantmill.common.program import UserError, parser
from quantmill.plan.check_config import check


def describe(config: Path | None) -> dict[str, Any]:
    """Return what the module prints. `left`: outputs of jobs that are left; `jobs`: their number, by rule.

    A mistake in the config ends the program with one line, as it ends Snakemake. Raises `UserError` for a file that
    cannot be read.
    """
    if config:
        check(config)
    output = OutputSettings(quiet={Quietness.ALL}, enable_file_logging=False)
    with SnakemakeApi(output) as api, contextlib.redirect_stdout(io.StringIO()):
        settings = ConfigSettings(configfiles=[config] if config else [])
        workflow_api = api.workflow(ResourceSettings(cores=1), settings, snakefile=Path("Snakefile"))
        workflow_api.dag(DAGSettings(targets={"report"})).summary()  # builds the graph, and leaves locks alone
        workflow = workflow_api._workflow  # the pinned Snakemake has no public access to it
        names, study = workflow.globals, workflow.globals["STUDY"]
        jobs = [job for job in workflow.dag.needrun_jobs() if job.rule.name != "report"]
        costs = names["study_jobs"]()
        return {
            "study": study,
            "reference": costs.reference,
            "cells": [
                row | {"layout": names["REGISTRY"].layout(row["format"], study, study["models"][row["model"]])}
                for row in names["rows"]()
            ],
            "servers": {
                name: [*engine.loads]
                for name, engine in names["ENGINES"].items()
                if engine.serves and not engine.attached
            },
            "jobs": Counter(job.rule.name for job in jobs),
            "left": sorted({str(file) for job in jobs for file in job.output}),
            "build_gpus": {name: names["build_gpus"](name) for name in costs.formats},
            "formats": {name: asdict(each) for name, each in costs.formats.items()},
            "engines": {name: asdict(each) for name, each in costs.engines.items()},
        }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("config", type=Path, nargs="?", help="a study; the demo's config without one")
    try:
        json.dump(describe(arguments.parse_args().config), sys.stdout)
    except WorkflowError as error:
        raise UserError(" ".join(str(error).split())) from None
