"""Cells, the rows of a study: a model's artifact, in its format's own engine (`FORMAT`) or in a run of the config
(`FORMAT@RUN`)."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from quantmill.checkpoint.gguf_names import split_names
from quantmill.checkpoint.selection import is_artifacts
from quantmill.client.urls import wrong_url
from quantmill.common.atomic import MANIFEST
from quantmill.plan.config_values import ConfigError
from quantmill.plan.registry import TAKEN, Engine, Registry, check_known, unknown_format

# variables of a run's environment that Quantmill sets: thread counts, GPUs, Python's paths
OURS = re.compile("CUDA_VISIBLE_DEVICES|PYTHON|QUANTMILL|.*_NUM_THREADS$")
AT_START = re.compile("LD_|MALLOC_|GLIBC_")  # read once, when a program starts
SECRET = re.compile("(.*_)?(TOKEN|SECRET|PASSWORD|CREDENTIALS?|KEY)$", re.IGNORECASE)


@dataclass(frozen=True)
class Cell:
    """One row. `run` is None for the default run; `options` are in the engine's own words."""

    model: str
    artifact: str
    run: str | None
    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 1
    prebuilt: bool = False

    @property
    def name(self) -> str:
        """`ARTIFACT` or `ARTIFACT@RUN`, the name of files and rows."""
        return self.artifact if self.run is None else f"{self.artifact}@{self.run}"


def check_name(where: str, name: str, others: Collection[str]) -> None:
    """Raise `ConfigError` for an artifact's name that is taken."""
    if name in others:
        raise ConfigError(f"{where}: a format has this name; choose another")
    if re.match(TAKEN, name):
        raise ConfigError(f"{where}: Quantmill names other files so; choose another name")


def check_variants(study: Mapping[str, Any], schema: Mapping[str, Any], registry: Registry) -> None:
    """Raise `ConfigError` for the first variant that does not make another artifact of a format."""
    for name, variant in study["variants"].items():
        where = f"variants.{name}"
        base = variant["format"]
        check_name(where, name, registry.formats)
        if base not in registry.formats:
            raise ConfigError(f"{where}: {unknown_format(base, registry.formats)}")
        given = {key: value for key, value in variant.items() if key != "format"}
        key = registry.formats[base].config
        properties = schema["properties"][key]["properties"] if key else {}
        for each in given:
            check_known(f"{where}: {base} has no parameter {each!r}", each, properties)
        if all(study[key][each] == value for each, value in given.items()):
            raise ConfigError(f"{where}: is {base} itself; give it a parameter of its own")
        for each, value in given.items():
            check_value(f"{where}.{each}", value, properties[each])
        if not any(name in artifacts(study, model) for model in study["models"].values()):
            raise ConfigError(f"{where}: no model has {base}; add it to formats")


def check_value(where: str, value: Any, schema: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a value that does not fit its JSON schema."""
    if error := next(jsonschema.Draft202012Validator(schema).iter_errors(value), None):
        raise ConfigError(f"{where}: {error.message}")


def check_engine(where: str, name: str, registry: Registry) -> Engine:
    """Return the engine of this name. Raises `ConfigError` if it is unknown, or cannot be installed or run here."""
    check_known(f"{where}: unknown engine {name!r}", name, registry.engines)
    engine = registry.engines[name]
    if why := registry.why_not_here(engine.env):
        raise ConfigError(f"{where}: {name}: {why}")
    if registry.device not in ("auto", *engine.devices):
        raise ConfigError(f"{where}: {name} does not run on device {registry.device}; leave it out")
    return engine


def check_gpus(where: str, gpus: int, registry: Registry) -> None:
    """Raise `ConfigError` for more GPUs than jobs may use."""
    if gpus > 1 and registry.device == "cpu":
        raise ConfigError(f"{where}.gpus: {gpus}, and the device is cpu; leave gpus out")
    if registry.gpus is not None and gpus > max(1, registry.gpus):
        more = f"run with --resources gpu={gpus} hub=2"  # which replaces the profile's list
        raise ConfigError(f"{where}.gpus: {gpus}, and jobs may use {registry.gpus}; {more}")


def check_runs(study: Mapping[str, Any], registry: Registry) -> None:
    """Raise `ConfigError` for the first run whose engine, options or formats do not fit."""
    for name, run in study["runs"].items():
        where = f"runs.{name}"
        engine = check_engine(where, run["engine"], registry)
        check_url(where, run, engine)
        check_environment(f"{where}.environment", run, engine)
        for option, value in run["options"].items():
            if engine.options is None:
                continue
            check_known(f"{where}.options: {run['engine']} has no option {option!r}", option, engine.options)
            check_value(f"{where}.options.{option}", value, engine.options[option])
        if run["gpus"] > 1 and not engine.multi_gpu:
            raise ConfigError(f"{where}.gpus: {run['engine']} uses one GPU; leave gpus out")
        check_gpus(where, run["gpus"], registry)
        for format in run["formats"]:
            layouts = {registry.layout(format, study, model) for model in study["models"].values()} - {""}
            if not layouts:
                names = {*registry.formats, *study["variants"]}
                raise ConfigError(f"{where}.formats: {unknown_format(format, names)}")
            if not layouts <= set(engine.loads):
                raise ConfigError(
                    f"{where}: {run['engine']} does not load {format} ({', '.join(sorted(layouts))}); "
                    f"it loads {', '.join(engine.loads)}"
                )
            if not any(format in artifacts(study, model) for model in study["models"].values()):
                raise ConfigError(f"{where}.formats: no model has {format}; add it to formats")


def check_url(where: str, run: Mapping[str, Any], engine: Engine) -> None:
    """Raise `ConfigError` for an attached server without a url, and for a url of a server that Quantmill starts."""
    if engine.attached and "url" not in run:
        raise ConfigError(f"{where}: {run['engine']} needs the address of a running server; add url: http://HOST:PORT")
    if not engine.attached and "url" in run:
        raise ConfigError(f"{where}.url: {run['engine']} is started by Quantmill; remove url")
    if engine.attached and (why := wrong_url(run["url"])):
        raise ConfigError(f"{where}.url: {why}")


def check_environment(where: str, run: Mapping[str, Any], engine: Engine) -> None:
    """Raise `ConfigError` for variables that cannot reach the engine, for those that Quantmill sets, and for secrets,
    since results show every variable."""
    for name in run["environment"]:
        if engine.attached:
            raise ConfigError(f"{where}: {run['engine']} is a server that you start; set {name} there")
        if OURS.match(name):
            raise ConfigError(f"{where}: {name} is set by Quantmill; remove it")
        if AT_START.match(name) and not engine.serves:
            raise ConfigError(f"{where}: {name} is read at a program's start and works for servers only; remove it")
        if SECRET.match(name):
            raise ConfigError(f"{where}: {name} looks like a secret, and results show it; set it in your shell")


def check_serving(study: Mapping[str, Any], registry: Registry) -> None:
    """Raise `ConfigError` for empty ranges, for loads without a server, and for servers that would queue them."""
    loads = study["loads"]
    for name in ("prompt_tokens", "new_tokens"):
        if isinstance(loads[name], list) and loads[name][0] > loads[name][1]:
            raise ConfigError(f"loads.{name}: {loads[name]} is an empty range; write the smaller number first")
    if wants_loads(study) and not any(registry.engines[run["engine"]].serves for run in study["runs"].values()):
        servers = ", ".join(sorted(name for name, engine in registry.engines.items() if engine.serves))
        raise ConfigError(f"loads: no run is a server; add one under runs, with an engine of {servers}")
    most = max(loads["concurrency"], default=0)
    for name, run in study["runs"].items():
        slots = registry.engines[run["engine"]].slots
        if most > 1 and slots and run["options"].get(slots, 1) == 1:
            raise ConfigError(
                f"runs.{name}: {run['engine']} answers one request at a time, and loads.concurrency keeps {most} in "
                f"flight; set options: {{{slots}: {most}}}"
            )


def wants_loads(study: Mapping[str, Any]) -> bool:
    """Return whether the study puts servers under loads."""
    loads = study["loads"]
    return bool(loads["burst"] or loads["concurrency"] or loads["rates"] or loads["goodput"])


def check_prebuilt(name: str, model: Mapping[str, Any], study: Mapping[str, Any], registry: Registry) -> None:
    """Raise `ConfigError` for the first prebuilt artifact of a model whose name is taken, that is missing, or that its
    engine does not load."""
    for each, prebuilt in model["prebuilt"].items():
        where = f"models.{name}.prebuilt.{each}"
        check_name(where, each, (*registry.formats, *study["variants"]))
        layout = prebuilt["layout"]
        known = [each for each, words in registry.layouts.items() if words.prebuilt]
        check_known(f"{where}.layout: unknown layout {layout!r}", layout, known)
        pattern = registry.layouts[layout].holds
        alone = "*" in pattern
        if "hub" in prebuilt and ("file" in prebuilt) != alone:
            what = f"name its file, such as NAME{pattern[1:]}" if alone else "its files are known; leave file out"
            raise ConfigError(f"{where}.file: of the hub's {layout} artifacts, {what}")
        runs_in = registry.prebuilt_engine(prebuilt)
        engine = check_engine(where, runs_in, registry)
        if engine.serves or engine.attached:
            raise ConfigError(f"{where}.engine: {runs_in} is a server; name it under runs, and another engine here")
        if layout not in engine.loads:
            raise ConfigError(f"{where}.engine: {runs_in} does not load {layout}; it loads {', '.join(engine.loads)}")
        if "path" not in prebuilt:
            continue
        path = Path(prebuilt["path"])
        if alone and path.is_file() and path.match(pattern):
            continue
        if not path.is_dir():
            raise ConfigError(f"{where}: there is no folder{f' or {pattern} file' if alone else ''} {path}")
        if not any(each.is_file() for each in path.glob(pattern)):
            raise ConfigError(f"{where}: {path} has no {pattern}, so it is not a {layout} artifact")


def prebuilt_files(prebuilt: Mapping[str, Any]) -> list[Path]:
    """List the files of a local prebuilt artifact: those of its folder, or all parts of a split file."""
    path = Path(prebuilt.get("path", ""))
    if "path" not in prebuilt:
        return []
    if not path.is_dir():
        return [path.with_name(name) for name in split_names(path.name)]
    files = [each for each in path.iterdir() if is_artifacts(each.name) or each.suffix == ".safetensors"]
    return [*files, *([path / MANIFEST] if (path / MANIFEST).is_file() else [])]


def artifacts(study: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """Return a model's artifacts in the order of rows: each format and its variants, then prebuilt ones."""
    names: dict[str, None] = {}
    for format in model["formats"]:
        names[format] = None
        names |= {name: None for name, variant in study["variants"].items() if variant["format"] == format}
    return [*names, *model.get("prebuilt", {})]


def of_study(study: Mapping[str, Any], registry: Registry) -> Iterator[Cell]:
    """Yield the cells of a checked study, each artifact's default run first."""
    for name, model in study["models"].items():
        for artifact in artifacts(study, model):
            prebuilt = artifact in model["prebuilt"]
            if prebuilt:
                engine = registry.prebuilt_engine(model["prebuilt"][artifact])
            else:
                engine = registry.formats[study["variants"].get(artifact, {"format": artifact})["format"]].engine
            yield Cell(name, artifact, None, engine, prebuilt=prebuilt)
            for run, words in study["runs"].items():
                if artifact in words["formats"]:
                    options = words["options"] | {key: words[key] for key in ("url",) if key in words}
                    if words["environment"]:
                        options["environment"] = {key: str(value) for key, value in words["environment"].items()}
                    yield Cell(name, artifact, run, words["engine"], options, words["gpus"], prebuilt)
