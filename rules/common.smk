"""Tables and small helpers that the other files use."""

import ctypes
import json
import os
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

RULES = Path(workflow.current_basedir.get_path_or_uri(secret_free=True))
if not RULES.is_dir():
    sys.exit(f"error: {RULES}: is no folder of this machine; clone Quantmill, and name its Snakefile by a path")
sys.path.insert(0, str(RULES.parent / "scripts"))
from quantmill.common import surroundings
from quantmill.common.program import printable
from quantmill.common.code_hash import closure, digest
from quantmill.plan import cells, jobs, lengths, registry, vllm_parallelism
from quantmill.checkpoint import model_shape
from quantmill.plan.config import CHECKOUT, TEXTS, complete, source
from quantmill.plan.resources import CUDA_BUILD, BuildResources, RunResources, Memory, Size
from quantmill.plan.config_values import ConfigError, check_file, is_plain

os.environ["PYTHONSAFEPATH"] = "1"  # for `python -m snakemake`, by which Snakemake runs a cluster's jobs

LAYOUTS = dict(registry.LAYOUTS)  # name -> plan.registry.Layout; a format's file may add its own
FORMATS = {}  # name -> plan.registry.Format; filled by rules/formats/*.smk
ENGINES = {}  # name -> plan.registry.Engine; filled by rules/engines/*.smk
COMPILED = {}  # environment -> files that a rule compiles for it besides; filled by the files of its formats
# formats' files ask for these before the config can be checked, which needs to know the formats
INTERPRETERS = config["interpreters"] if isinstance(config.get("interpreters"), dict) else {}
VARIANTS = {
    name: variant.get("format")
    for name, variant in (config["variants"] if isinstance(config.get("variants"), dict) else {}).items()
    if isinstance(name, str) and isinstance(variant, dict)
}
PACKAGE = CHECKOUT / "scripts/quantmill"
ENVS = [pins.stem for pins in sorted((CHECKOUT / "envs").glob("*.txt"))]
REGISTRY = registry.Registry(FORMATS, ENGINES, LAYOUTS, ENVS)

# Only what downloads may ask the hub: whatever another job needs is among its inputs.
# Libraries that look for a GPU when imported must not start CUDA before devices.card has chosen one.
# What a user tells Python reaches no job, nor do packages in the home; a wrapper script that `interpreters` names says
# what it wants after that.
shell.prefix(
    "set -euo pipefail; "
    f"unset ${{{{!{surroundings.PREFIX}@}}}}; export {' '.join(map('='.join, surroundings.OURS.items()))}; "
    "export ASKED_OFFLINE=${{HF_HUB_OFFLINE:-0}} HF_HUB_OFFLINE=1 PYTORCH_NVML_BASED_CUDA_CHECK=1; "
)
ASK_THE_HUB = "HF_HUB_OFFLINE=$ASKED_OFFLINE "


wildcard_constraints:
    artifact=registry.NAME,
    cell=f"{registry.NAME}(@{registry.NAME})?",
    env="|".join(map(re.escape, ENVS)),
    text="|".join(TEXTS),


def refuse(reason):
    """End Snakemake with one line, which names the rules' file where one is being read."""
    files = [file.get_path_or_uri(secret_free=True) for file in workflow.included_stack[1:]]
    sys.exit(": ".join(["error", *(os.path.relpath(file, RULES.parent) for file in files), str(reason)]))


def Format(**words):
    """What a format's file puts in FORMATS: see plan.registry.Format."""
    return entry(registry.Format, words)


def Layout(**words):
    """What a format's file puts in LAYOUTS: see plan.registry.Layout."""
    return entry(registry.Layout, words)


def Engine(**words):
    """What an engine's file puts in ENGINES: see plan.registry.Engine."""
    return entry(registry.Engine, words)


def entry(kind, words):
    try:
        return registry.entry(kind, words)
    except ConfigError as error:
        refuse(error)


def resource_limit(resource):
    """How much of a resource all jobs together may use; None where nothing limits it."""
    limit = workflow.global_resources.get(resource)
    return limit and limit.value


def device_here():
    """What device `auto` means where jobs run on this machine; `auto` where a cluster's jobs run on others, each of which
    reads this file too and may have no card."""
    if resource_limit("_nodes") is not None or not workflow.is_main_process:
        return "auto"
    try:
        return "cpu" if ctypes.CDLL("libcuda.so.1").cuInit(0) else "cuda"
    except OSError:  # no driver
        return "cpu"


def check_study(config):
    """The config with its defaults; a mistake ends Snakemake with one line."""
    schema = yaml.safe_load((CHECKOUT / "config/config.schema.yaml").read_text())
    modules = [file.stem for file in (PACKAGE / "engines").glob("[!_]*.py")]
    programs = [f"build.{file.stem}" for file in (PACKAGE / "build").glob("[!_]*.py")]
    try:
        registry.check_registry(FORMATS, ENGINES, LAYOUTS, ENVS, modules, programs)
    except ConfigError as error:
        refuse(error)
    try:
        for file in workflow.configfiles:
            check_file(Path(file))
        return complete(config, schema, replace(REGISTRY, device=device_here(), gpus=resource_limit("gpu")))
    except ConfigError as error:
        sys.exit(f"config error: {printable(str(error))}")


def format_of(artifact):
    """The registered format of a format or variant."""
    return VARIANTS.get(artifact, artifact)


def artifact_pattern(*formats):
    """Formats and their variants, as a wildcard's constraint."""
    return "|".join(re.escape(name) for name in (*formats, *(each for each in VARIANTS if VARIANTS[each] in formats)))


def parameters(artifact):
    """The parameters of a format or variant, in its tool's words; none where it has none."""
    variant = {key: value for key, value in STUDY["variants"].get(artifact, {}).items() if key != "format"}
    return STUDY.get(FORMATS[format_of(artifact)].config, {}) | variant


def cell(wildcards):
    """The cell that a job's wildcards name."""
    return find_cell(wildcards.model, wildcards.cell)


def find_cell(model, name):
    """A model's cell; a format that the study leaves out can be asked for by its file."""
    if (model, name) not in CELLS and name not in FORMATS:
        names = [each for owner, each in CELLS if owner == model]
        refuse(f"artifacts/{model}: no cell is called {name!r}{registry.suggestion(name, names)}")
    return CELLS.get((model, name)) or cells.Cell(model, name, None, FORMATS[name].engine)


class Program(NamedTuple):
    """A program of ours. command: what an interpreter is given. digest: a hash of every file of ours that it runs. It is
    a parameter: Snakemake runs a job again when one changes, where so many inputs would take most of a plan's time."""

    command: list[str]
    digest: str


@cache
def program(name, *more):
    """The `Program` of a name such as `latency.measure`; `more` are files besides that it reads."""
    return Program([str(PACKAGE), name], code_hash(name, *more))


@cache
def code_hash(module, *more):
    """The digest of a module of ours and all that it imports, and of `more`."""
    file = PACKAGE / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        refuse(f"the program {file} is missing")
    return digest(*closure(file, PACKAGE.parent), *map(Path, more))


@cache
def runner(name, engine, options="", gpus=1):
    """What a program that runs an engine is called with: its interpreter and its arguments. And a hash of what it is
    made of, the engine's module with it: that is imported by name, so that no import shows it."""
    arguments = [f"--engine={engine}"]
    arguments += [f"--options={options}"] if options else []
    arguments += [f"--gpus={gpus}"] if gpus > 1 else []
    return {
        "python": python(ENGINES[engine].env),
        "program": program(name).command,
        "arguments": arguments,
        "made_of": [code_hash(name), code_hash(f"engines.{ENGINES[engine].module(engine)}")],
    }


def cell_runner(name, wildcards):
    """`runner` of a cell's engine."""
    each = cell(wildcards)
    return runner(name, each.engine, json.dumps(each.options, sort_keys=True) if each.options else "", each.gpus)


def python(env):
    """The interpreter of an environment: the one that the config names, else the one that the workflow builds. One
    without pins ends Snakemake with one line."""
    if env not in INTERPRETERS and env not in ENVS:
        refuse(f"the pins of the environment {env!r}, envs/{env}.txt, are missing{registry.suggestion(env, ENVS)}")
    return INTERPRETERS.get(env, str(CHECKOUT / f"envs/{env}/bin/python"))


def environment(env, compiled=True):
    """What a job takes as input so that its environment is there, and rebuilt when a pin changes."""
    built = [] if python(env) == INTERPRETERS.get(env) else [str(CHECKOUT / f"envs/{env}")]
    return built + COMPILED.get(env, []) if compiled else built


def intermediate(output):
    """An output that only leads to artifacts and figures: removed once nothing needs it, where the study says so."""
    return temp(output) if STUDY["remove_intermediates"] else output


def has_quality(model):
    """Whether a model's quality means anything: random weights are measured for speed alone."""
    return source(STUDY["models"][model])[0] != "random"


def has_speed(cell):
    """Whether a cell's speed means anything: some engines only calculate what a format's kernels would."""
    return not ENGINES[cell.engine].no_speed


def has_gate(wildcards):
    """Whether an artifact is held against what its model's source predicts before it is published."""
    return has_quality(wildcards.model)


def gate_gpus(wildcards):
    """GPUs of a job that builds an artifact: one where the quality gate runs it."""
    return int(has_gate(wildcards))


def gate_input(wildcards):
    """What the quality gate compares with, and the environment that computes what it expects. Without a gate a build waits
    for the evaluation's tokens too: tools load a tokenizer without limits, and by then one has ended within them."""
    model = f"artifacts/{wildcards.model}"
    tokens = f"{model}/tokens/evaluation.json"
    return [f"{model}/expected.json", tokens, *environment("torch")] if has_gate(wildcards) else [tokens]


def gate_options(wildcards, env="torch"):
    """The same, as flags of the program that builds. env: the environment that reads the artifact's weights."""
    if not has_gate(wildcards):
        return []
    reference, evaluation, *_ = gate_input(wildcards)
    options = ["--gate-reference", reference, "--gate-evaluation", evaluation, f"--gate-python={python(env)}"]
    return [*options, f"--gate-protocol={STUDY['perplexity']}", f"--gate-factor={STUDY['max_perplexity_ratio']}"]


def local_path(file):
    """Where an input can be read before its job runs: in this folder, also where jobs take it from a storage that is this
    folder (profiles/kubernetes). By the name of one that is not there yet, Snakemake sees that it has to ask again."""
    here = Path(*Path(file).parts[Path(file).parts.index("artifacts") :])
    return here if here.exists() else Path(file)


@cache
def study_jobs():
    """What the study's jobs take: see plan.jobs."""
    built = {name: FORMATS[format_of(name)].resources for name in (*FORMATS, *VARIANTS)}
    formats = {name: costs and costs.with_parameters(parameters(name)) for name, costs in built.items()}
    reference = STUDY["reference"], FORMATS[format_of(STUDY["reference"])].engine
    return jobs.Jobs(STUDY, reference, formats, {name: engine.resources for name, engine in ENGINES.items()})


def build_ask(wildcards, input):
    """What a job asks for that makes a folder of weights from input.source; a rule of no format copies them."""
    model = model_shape.of_folder(local_path(input.source))
    if "artifact" not in wildcards.keys():
        return study_jobs().copy(model)
    texts = [file for file in input if str(file).endswith("tokens/calibration.json")]
    tokens = local_path(texts[0]).stat().st_size // jobs.BYTES_AN_ID if texts else None
    engine = find_cell(wildcards.model, wildcards.artifact).engine
    return study_jobs().build(wildcards.artifact, engine, model, has_gate(wildcards), tokens)


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
    return list(dict.fromkeys(f"artifacts/{each.model}/{each.artifact}" for each in CELLS.values()))
