"""Tables and helpers that the other files use."""

import ctypes
import json
import os
import re
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import yaml

RULES = Path(workflow.current_basedir.get_path_or_uri(secret_free=True))
if not RULES.is_dir():
    sys.exit(f"error: {RULES}: is not a local folder; clone Quantmill, and name its Snakefile by a path")
sys.path.insert(0, str(RULES.parent / "scripts"))
from quantmill.common import surroundings
from quantmill.common.program import printable, suggestion
from quantmill.common.code_hash import closure, digest
from quantmill.build.quantizer import placement
from quantmill.plan import cells, jobs, lengths, registry, vllm_parallelism
from quantmill.checkpoint import model_shape
from quantmill.plan.config import CHECKOUT, TEXTS, complete, source
from quantmill.plan.resources import CUDA_BUILD, BuildResources, Memory, RunResources, Size, Time
from quantmill.plan.config_values import ConfigError, check_file, is_plain

os.environ["PYTHONSAFEPATH"] = "1"  # for `python -m snakemake`, by which Snakemake runs a cluster's jobs

LAYOUTS = dict(registry.LAYOUTS)  # name -> plan.registry.Layout; a format's file may add its own
FORMATS = {}  # name -> plan.registry.Format; filled by rules/formats/*.smk
ENGINES = {}  # name -> plan.registry.Engine; filled by rules/engines/*.smk
COMPILED = {}  # environment -> further files that a rule compiles for it; filled by the files of its formats
# formats' files need these before the config can be checked, since the check needs the formats
INTERPRETERS = config["interpreters"] if isinstance(config.get("interpreters"), dict) else {}
VARIANTS = {
    name: variant.get("format")
    for name, variant in (config["variants"] if isinstance(config.get("variants"), dict) else {}).items()
    if isinstance(name, str) and isinstance(variant, dict)
}
PACKAGE = CHECKOUT / "scripts/quantmill"
ENVS = [pins.stem for pins in sorted((CHECKOUT / "envs").glob("*.txt"))]
REGISTRY = registry.Registry(FORMATS, ENGINES, LAYOUTS, ENVS)

# Only download jobs may contact the hub; all other jobs run offline.
# Libraries that look for a GPU when imported must not start CUDA before devices.gpu_lock has chosen one.
# Jobs get no Python variables of the user and no packages of the home folder. A wrapper script that `interpreters`
# names can set them again.
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
    """End Snakemake with one line, which names the rules' file that is being read, if any."""
    files = [file.get_path_or_uri(secret_free=True) for file in workflow.included_stack[1:]]
    sys.exit(": ".join(["error", *(os.path.relpath(file, RULES.parent) for file in files), str(reason)]))


def entry(kind, **words):
    """Make an entry of FORMATS, LAYOUTS or ENGINES; a mistake ends Snakemake with one line."""
    try:
        return registry.entry(kind, words)
    except ConfigError as error:
        refuse(error)


Format, Layout, Engine = (partial(entry, kind) for kind in (registry.Format, registry.Layout, registry.Engine))


def resource_limit(resource):
    """Return the limit of a resource for all jobs together; None without a limit."""
    limit = workflow.global_resources.get(resource)
    return limit and limit.value


def device_here():
    """Return the meaning of device `auto` here; `auto` if a cluster's nodes run the jobs. They read this file too and may
    have no GPU."""
    if resource_limit("_nodes") is not None or not workflow.is_main_process:
        return "auto"
    try:
        return "cpu" if ctypes.CDLL("libcuda.so.1").cuInit(0) else "cuda"
    except OSError:  # no driver
        return "cpu"


def check_study(config):
    """Return the config with its defaults; a mistake ends Snakemake with one line."""
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
    """Return the registered format of a format or variant."""
    return VARIANTS.get(artifact, artifact)


def artifact_pattern(*formats):
    """Return a wildcard's constraint that matches formats and their variants."""
    return "|".join(re.escape(name) for name in (*formats, *(each for each in VARIANTS if VARIANTS[each] in formats)))


def parameters(artifact):
    """Return the parameters of a format or variant, by its tool's names."""
    variant = {key: value for key, value in STUDY["variants"].get(artifact, {}).items() if key != "format"}
    return STUDY.get(FORMATS[format_of(artifact)].config, {}) | variant


def cell(wildcards):
    """Return the cell of a job's wildcards; the reference's if they name none."""
    return find_cell(wildcards.model, wildcards.get("cell", STUDY["reference"]))


def find_cell(model, name):
    """Return a model's cell. A file may also be requested of a format that is not in the study."""
    if (model, name) not in CELLS and name not in FORMATS:
        names = [each for owner, each in CELLS if owner == model]
        refuse(f"artifacts/{model}: no cell is called {name!r}{suggestion(name, names)}")
    return CELLS.get((model, name)) or cells.Cell(model, name, None, FORMATS[name].engine)


class Program(NamedTuple):
    """A program of ours. command: an interpreter's arguments. digest: a hash of all our files that it runs. It is a
    parameter, since Snakemake reruns a job if one changes, and as inputs these files would take most of a plan's time.
    """

    command: list[str]
    digest: str


@cache
def program(name, *more):
    """Return the `Program` of a name such as `latency.measure`; `more`: further files that it reads."""
    return Program([str(PACKAGE), name], code_hash(name, *more))


@cache
def code_hash(module, *more):
    """Return the digest of a module of ours, of all its imports, and of `more`."""
    file = PACKAGE / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        refuse(f"the program {file} is missing")
    return digest(*closure(file, PACKAGE.parent), *map(Path, more))


@cache
def runner(name, engine, options="", gpus=1):
    """Return the interpreter and arguments of a program that runs an engine, and hashes of its code. The engine's module
    is added, since it is imported by name."""
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
    """Return the `runner` of a cell's engine."""
    each = cell(wildcards)
    return runner(name, each.engine, json.dumps(each.options, sort_keys=True) if each.options else "", each.gpus)


def python(env):
    """Return an environment's interpreter: the one in the config, else that of the environment that the workflow builds.
    Missing pins end Snakemake with one line."""
    if env not in INTERPRETERS and env not in ENVS:
        refuse(f"the pins of the environment {env!r}, envs/{env}.txt, are missing{suggestion(env, ENVS)}")
    return INTERPRETERS.get(env, str(CHECKOUT / f"envs/{env}/bin/python"))


def environment(env, compiled=True):
    """Return a job's inputs for its environment, so that it is built, and rebuilt when a pin changes."""
    built = [] if python(env) == INTERPRETERS.get(env) else [str(CHECKOUT / f"envs/{env}")]
    return built + COMPILED.get(env, []) if compiled else built


def intermediate(output):
    """Mark an output that artifacts and figures are made from, and that `remove_intermediates` removes."""
    return temp(output) if STUDY["remove_intermediates"] else output


def has_quality(model):
    """Return whether a model's quality is measured: random weights have only a speed."""
    return source(STUDY["models"][model])[0] != "random"


def has_speed(cell):
    """Return whether a cell's speed is measured: some engines only emulate a format's kernels."""
    return not ENGINES[cell.engine].no_speed


def has_gate(wildcards):
    """Return whether an artifact must pass the quality gate before it gets its name."""
    return has_quality(wildcards.model)


def gate_gpus(wildcards):
    """Return the GPUs of a build: one if the quality gate runs the artifact."""
    return int(has_gate(wildcards))


def gate_input(wildcards):
    """Return the gate's inputs: expected predictions, tokens, and the environment that computes the expected ones. Without
    a gate a build waits for the tokens too: tools load a tokenizer without limits, and the tokens job has limits."""
    model = f"artifacts/{wildcards.model}"
    tokens = f"{model}/tokens/evaluation.json"
    return [f"{model}/expected.json", tokens, *environment("torch")] if has_gate(wildcards) else [tokens]


def gate_options(wildcards, env="torch"):
    """Return the gate's flags of a builder. env: the environment that reads the artifact's weights."""
    if not has_gate(wildcards):
        return []
    reference, evaluation, *_ = gate_input(wildcards)
    options = ["--gate-reference", reference, "--gate-evaluation", evaluation, f"--gate-python={python(env)}"]
    options += ["--gate-stream"] if STUDY["stream"] else []
    return [*options, f"--gate-protocol={STUDY['perplexity']}", f"--gate-factor={STUDY['max_perplexity_ratio']}"]


def local_path(file):
    """Return the local path of an input at planning time, also with remote storage (profiles/kubernetes). A missing file
    keeps its name, by which Snakemake sees that it must evaluate again later."""
    here = Path(*Path(file).parts[Path(file).parts.index("artifacts") :])
    return here if here.exists() else Path(file)


@cache
def study_jobs():
    """Return the study's plan.jobs.Jobs."""
    built = {name: FORMATS[format_of(name)].resources for name in (*FORMATS, *VARIANTS)}
    formats = {name: costs.with_parameters(parameters(name)) for name, costs in built.items() if costs}
    engines = {name: engine.resources for name, engine in ENGINES.items() if engine.resources}
    reference = STUDY["reference"], FORMATS[format_of(STUDY["reference"])].engine
    return jobs.Jobs(STUDY, reference, formats, engines)


def shape_of_model(wildcards, folder):
    """Return the model's shape from the first folder with a config.json, else from the weights in `folder`.
    `remove_intermediates` removes the source."""
    names = ("safetensors", "source", *cells.artifacts(STUDY, STUDY["models"][wildcards.model]))
    folders = [Path(f"artifacts/{wildcards.model}/{name}") for name in names]
    return next(filter(None, map(model_shape.of_config, folders)), None) or model_shape.of_folder(local_path(folder))


def plan_build(wildcards, input):
    """Plan a job that makes a folder of weights from input.source; a rule without an artifact copies them."""
    model = model_shape.of_folder(local_path(input.source))
    if "artifact" not in wildcards.keys():
        return study_jobs().copy(model)
    texts = [file for file in input if str(file).endswith("tokens/calibration.json")]
    tokens = local_path(texts[0]).stat().st_size // jobs.BYTES_AN_ID if texts else None
    engine = find_cell(wildcards.model, wildcards.artifact).engine
    return study_jobs().build(wildcards.artifact, engine, model, has_gate(wildcards), tokens)


def request(plan, disk=False):
    """Return a rule's resources, from a function that returns a job's plan.jobs.Resources; `disk` adds its disk."""
    asked = {
        "mem_mb": lambda wildcards, input, attempt: attempt * plan(wildcards, input).mb,
        "runtime": lambda wildcards, input: plan(wildcards, input).minutes,
    }
    return asked | ({"disk_mb": lambda wildcards, input: plan(wildcards, input).disk_mb} if disk else {})


def memory(mb):
    """Return `mem_mb` of a rule whose program takes `mb`. If the profile retries, a failed job asks for more."""
    return lambda wildcards, attempt: attempt * jobs.job_mb(mb)


def artifacts():
    """List every artifact of the study."""
    return list(dict.fromkeys(f"artifacts/{each.model}/{each.artifact}" for each in CELLS.values()))
