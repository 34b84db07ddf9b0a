"""Tables and small helpers that the other files use."""

import json
import os
import re
import sys
from functools import cache
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(workflow.basedir, "scripts")))
from common.program import printable
from planning import jobs, shape
from planning.config import (
    FORMAT_NAME,
    TEXTS,
    ConfigError,
    check_formats,
    checked,
    nearest,
    registered,
    source,
)
from planning.costs import Costs, EngineCosts, Memory, Size
from planning.sources import closure, digest
from planning.values import check_file, is_plain

FORMATS = {}  # name -> planning.config.Format; filled by rules/formats/*.smk
ENGINE_COSTS = {}  # name -> planning.costs.EngineCosts; filled by rules/engines/*.smk
# formats' files ask for it before the config can be checked, which needs to know the formats
INTERPRETERS = config["interpreters"] if isinstance(config.get("interpreters"), dict) else {}
ENVS = [pins.stem for pins in sorted(Path("envs").glob("*.txt"))]
ENGINES = [
    file.stem for file in sorted(Path("scripts/engines").glob("[!_]*.py")) if "\nclass Engine" in file.read_text()
]

# Only what downloads may ask the hub: whatever another job needs is among its inputs.
# Libraries that look for a GPU when imported must not start CUDA before devices.card has chosen one.
shell.prefix(
    "set -euo pipefail; "
    "export ASKED_OFFLINE=${{HF_HUB_OFFLINE:-0}} HF_HUB_OFFLINE=1 PYTORCH_NVML_BASED_CUDA_CHECK=1; "
)
ASK_THE_HUB = "HF_HUB_OFFLINE=$ASKED_OFFLINE "


wildcard_constraints:
    model=r"[A-Za-z0-9][A-Za-z0-9._-]*",
    format=FORMAT_NAME,
    env="|".join(map(re.escape, ENVS)),
    text="|".join(TEXTS),


def refuse(reason):
    """End Snakemake with one line, which names the rules' file where one is being read."""
    files = [file.get_path_or_uri(secret_free=True) for file in workflow.included_stack[1:]]
    sys.exit(": ".join(["error", *(os.path.relpath(file, workflow.basedir) for file in files), str(reason)]))


def Format(**words):
    """What a format's file puts in FORMATS: see planning.config.Format."""
    try:
        return registered(words)
    except ConfigError as error:
        refuse(error)


def makers(format):
    """The rules that make a format's artifact: name -> file. Where outputs go to a storage, its folder precedes them."""
    return {
        maker.name: os.path.relpath(maker.snakefile, workflow.basedir)
        for maker in workflow.rules
        if any(file.match(f"{file.partition('artifacts/')[0]}artifacts/model/{format}") for file in maker.output)
    }


def check_study(config):
    """The config, checked and with its defaults; a mistake ends Snakemake with one line."""
    schema = yaml.safe_load(Path(workflow.basedir, "config", "config.schema.yaml").read_text())
    try:
        check_formats(FORMATS, ENVS, ENGINES, makers)
    except ConfigError as error:
        refuse(error)
    try:
        for file in workflow.configfiles:
            check_file(Path(file))
        return checked(config, schema, FORMATS, ENVS, makers)
    except ConfigError as error:
        sys.exit(f"config error: {printable(str(error))}")


@cache
def program(name, *more):
    """A program, and a hash of every file of ours that it runs and of `more`: a parameter, since Snakemake runs a job
    again when one changes, where so many inputs would take most of a plan's time."""
    scripts = Path("scripts")
    if not (scripts / name).is_file():
        refuse(f"the program {scripts / name} is missing")
    return str(scripts / name), digest(*closure(scripts / name, scripts), *map(Path, more))


@cache
def runner(name, format):
    """What a program that runs an engine is called with, for a format: its interpreter and the engine's name. And a
    hash of what it is made of, the engine's module with it: that is imported by name, so that no import shows it."""
    engine = f"engines/{FORMATS[format].engine}.py"
    path, made_of = program(name)
    return {
        "python": python(FORMATS[format].env),
        "program": path,
        "engine": FORMATS[format].engine,
        "made_of": [made_of, program(engine)[1]],
    }


def known(env):
    """The same environment; one without pins ends Snakemake with one line."""
    if env not in ENVS:
        refuse(f"the pins of the environment {env!r}, envs/{env}.txt, are missing{nearest(env, ENVS)}")
    return env


def python(env):
    """The interpreter of an environment: the one that the config names, else the one that the workflow builds."""
    return INTERPRETERS.get(known(env), f"envs/{env}/bin/python")


def environment(env):
    """What a job takes as input so that its environment is there, and rebuilt when a pin changes."""
    return [] if known(env) in INTERPRETERS else [f"envs/{env}"]


def passing(output):
    """An output that only leads to artifacts and figures: removed once nothing needs it, where the study says so."""
    return temp(output) if STUDY["clean"] else output


def measured(model):
    """Whether a model's quality means anything: random weights are measured for speed alone."""
    return source(STUDY["models"][model])[0] != "random"


def gated(wildcards):
    """Whether an artifact is held against what its model's source predicts before it is published."""
    return measured(wildcards.model)


def gate_input(wildcards):
    """What the quality gate compares with, and the environment that computes what it expects."""
    if not gated(wildcards):
        return []
    model = f"artifacts/{wildcards.model}"
    return [f"{model}/gate.json", f"{model}/tokens/evaluation.json", *environment("torch")]


def gate_options(wildcards):
    """The same, as flags of the program that builds."""
    if not gated(wildcards):
        return []
    reference, evaluation, *_ = gate_input(wildcards)
    options = ["--gate-reference", reference, "--gate-evaluation", evaluation, f"--gate-python={python('torch')}"]
    return [*options, f"--gate-protocol={STUDY['perplexity']}", f"--gate-factor={STUDY['quality_gate']}"]


def lying(file):
    """Where an input can be read before its job runs: in this folder, also where jobs take it from a storage that is this
    folder (profiles/kubernetes). By the name of one that is not there yet, Snakemake sees that it has to ask again."""
    here = Path(*Path(file).parts[Path(file).parts.index("artifacts") :])
    return here if here.exists() else Path(file)


@cache
def study_jobs():
    """What the study's jobs take: see planning.jobs."""
    costs = {
        name: format.costs and format.costs.at(STUDY.get(format.parameters, {})) for name, format in FORMATS.items()
    }
    reference = STUDY["reference"], FORMATS[STUDY["reference"]].engine
    return jobs.Jobs(STUDY, reference, costs, ENGINE_COSTS)


def build_ask(wildcards, input):
    """What a job asks for that makes a folder of weights from input.source; a rule of no format copies them."""
    model = shape.of_folder(lying(input.source))
    if "format" not in wildcards.keys():
        return study_jobs().copy(model)
    tokens = lying(input.calibration).stat().st_size // jobs.BYTES_AN_ID if "calibration" in input.keys() else None
    return study_jobs().build(wildcards.format, FORMATS[wildcards.format].engine, model, gated(wildcards), tokens)


def build_memory(wildcards, input):
    """MB of the same."""
    return build_ask(wildcards, input).mb


def build_disk(wildcards, input):
    """MB on the disk for the same."""
    return build_ask(wildcards, input).disk_mb


def build_minutes(wildcards, input):
    """Minutes of the same, at most."""
    return build_ask(wildcards, input).minutes


def artifacts():
    """Every artifact of the study."""
    return [f"artifacts/{name}/{format}" for name, model in STUDY["models"].items() for format in model["formats"]]
