"""Check a config at parse time, so that a mistake costs one line and a second instead of an hour of jobs."""

import os
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

from quantmill.common import plain_file
from quantmill.common.program import UserError, suggestion
from quantmill.plan import cells, lengths, publications, vllm_parallelism
from quantmill.plan.config_values import ConfigError, check_values
from quantmill.plan.model_source import CHECKOUT, source
from quantmill.plan.registry import Registry, check_known, unknown_format
from quantmill.report.task_columns import column_name
from quantmill.tokens import plain_text

MAX_TASK = 2**20  # bytes of a task's YAML
WEIGHT_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)

RENAMED = {"quality_gate": "max_perplexity_ratio", "clean": "remove_intermediates", "serving": "loads"}

# kind of text -> its default file in the repository, and for a model of the hub a file on the hub, pinned to a commit
TEXTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "prompts": (str(CHECKOUT / "config/prompts.txt"), None),
    "burst": (str(CHECKOUT / "config/burst.txt"), None),
    "evaluation": (
        str(CHECKOUT / "config/evaluation.txt"),
        {  # WikiText-2 raw, test
            "hub": "Salesforce/wikitext",
            "revision": "b08601e04326c79dfdd32d625aee71d232d685c3",
            "file": "wikitext-2-raw-v1/test-00000-of-00001.parquet",
        },
    ),
    "calibration": (
        str(CHECKOUT / "config/calibration.txt"),
        {  # C4, which shares nothing with WikiText
            "hub": "allenai/c4",
            "revision": "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
            "file": "en/c4-validation.00000-of-00008.json.gz",
            "documents": 2000,
        },
    ),
}


def complete(config: Mapping[str, Any], schema: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """Return the config with the schema's defaults filled in. Raises `ConfigError` for the first mistake."""
    check_values(config)
    present = {key: value for key, value in config.items() if value is not None}  # `key:` alone means its default
    for old, new in RENAMED.items():
        if old in present:
            raise ConfigError(f"{old}: is called {new} now")
    if isinstance(present.get("tasks"), list):
        present["tasks"] = {"names": present["tasks"]}
    filled = with_defaults(deepcopy(present), schema, schema)
    validator = jsonschema.Draft202012Validator(schema)
    errors = sorted(validator.iter_errors(filled), key=lambda error: (len(error.absolute_path), str(error.path)))
    if errors:
        raise ConfigError(describe(errors[0]))
    for kind in ("prompts", "burst"):
        filled["texts"].setdefault(kind, TEXTS[kind][0])
    for run in filled["runs"].values():
        with_defaults(run, schema["$defs"]["run"], schema)
    for model in filled["models"].values():
        model.setdefault("formats", filled["formats"])
        with_defaults(model, schema["$defs"]["model"], schema)
        for prebuilt in model["prebuilt"].values():
            if "hub" in prebuilt:
                prebuilt.setdefault("revision", "main")
    envs = {*registry.envs, *(engine.env for engine in registry.engines.values())}
    for name, interpreter in filled["interpreters"].items():
        check_known(f"interpreters: no environment is called {name!r}", name, envs)
        if not Path(shutil.which(interpreter) or "").is_file():
            raise ConfigError(f"interpreters.{name}: {interpreter} is not a program; name an installed python")
    if not Path(filled.get("llama_cpp", "")).is_dir():
        raise ConfigError(f"llama_cpp: there is no folder {filled['llama_cpp']}; name a build of llama.cpp")
    device = registry.device if filled["device"] == "auto" else filled["device"]
    registry = replace(registry, interpreters=filled["interpreters"], device=device)
    if filled["mlc"]["tool"] == "mlc_llm" and "mlc_llm" not in filled["interpreters"]:
        raise ConfigError("mlc.tool: mlc_llm is not built here; name a python that has it under interpreters.mlc_llm")
    cells.check_variants(filled, schema, registry)
    names = [*registry.formats, *filled["variants"]]
    if filled["reference"] not in names:
        raise ConfigError(f"reference: {unknown_format(filled['reference'], names)}")
    for name, model in filled["models"].items():
        for format in model["formats"]:
            if format not in names:
                raise ConfigError(f"formats: {unknown_format(format, names)}")
        try:
            check_model(name, model, filled, registry)
            cells.check_prebuilt(name, model, filled, registry)
            lengths.check(name, model, filled)
        except UserError as error:  # a pipe instead of a file
            raise ConfigError(f"models.{name}: {error}") from None
        except OSError as error:  # a folder that may not be read, a name that is too long
            raise ConfigError(f"models.{name}.source: {error.filename}: {error.strerror}") from None
        from_hub = source(model)[0] == "hub"
        if from_hub:
            model["source"].setdefault("revision", "main")
        model["texts"] = {
            kind: filled["texts"].get(kind, hub if from_hub and hub else shipped)
            for kind, (shipped, hub) in TEXTS.items()
        }
        for kind, text in model["texts"].items():
            if isinstance(text, str):
                check_text(f"texts.{kind}", Path(text))
    cells.check_runs(filled, registry)
    cells.check_gpus("quantizers", filled["quantizers"]["gpus"], registry)
    vllm_parallelism.check(filled, registry)
    cells.check_serving(filled, registry)
    check_tasks(filled["tasks"])
    publications.of_study(filled, registry)
    return filled


def with_defaults(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Fill a mapping's missing keys from the `default`s of its schema, in place and recursively.

    Keys get the schema's order and numbers its type. So a default that the config writes out gives a job the same
    parameters, and 4.0 becomes 4 where a program takes an integer.
    """
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if isinstance(value, dict):
        for key, child in schema.get("properties", {}).items():
            if key not in value and "default" in child:
                value[key] = deepcopy(child["default"])
            if key in value:
                value[key] = with_defaults(value.pop(key), child, root)
    if isinstance(value, list) and "items" in schema:
        value = [with_defaults(each, schema["items"], root) for each in value]
    for either in schema.get("oneOf", ()) if isinstance(value, float | list) else ():
        value = with_defaults(value, either, root)
    kind = schema.get("type")
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def describe(error: jsonschema.ValidationError) -> str:
    """Format a schema error as one line that starts with the key."""
    where = ".".join(map(str, error.absolute_path)) or "config"
    schema: Any = error.schema  # jsonschema's own type includes booleans
    expected: Any = error.validator_value
    given: Any = error.instance
    if error.validator == "additionalProperties" and isinstance(given, dict):
        known = schema.get("properties", {})
        unknown = next(key for key in given if key not in known)
        return f"{where}: unknown key {unknown!r}{suggestion(str(unknown), known)}"
    if error.validator == "required":
        missing = next(key for key in expected if key not in given)
        return f"{where}: {missing!r} is missing"
    if error.validator == "enum" and isinstance(given, str):
        return f"{where}: {given!r} is not possible{suggestion(given, expected)}"
    reason = schema.get("description") if error.validator in ("pattern", "oneOf") else None
    return f"{where}: {reason or error.message}".replace("\n", " ")


def check_text(key: str, path: Path) -> None:
    """Raise `ConfigError` for a text file that is missing or cannot be tokenised."""
    try:
        if not plain_file.is_there(path):
            raise ConfigError(f"{key}: {path} does not exist; name a text file")
        plain_text.read(path)
    except UserError as error:
        raise ConfigError(f"{key}: {error}") from None
    except plain_text.NotPlain as error:
        raise ConfigError(f"{key}: {path} {error}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}; name a text file") from None


def check_tasks(tasks: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a folder without tasks, for tasks that share a column, and for metrics of other tasks.

    The first job asks lm-evaluation-harness whether it knows the names.
    """
    if "include" in tasks:
        folder = Path(tasks["include"])
        if not folder.is_dir():
            raise ConfigError(f"tasks.include: there is no folder {folder}; name one with your own task YAMLs")
        found = [*folder.glob("**/*.yaml")]
        if not found:
            raise ConfigError(f"tasks.include: {folder} has no .yaml, so no tasks")
        try:
            sizes = {file: file.stat().st_size for file in found if plain_file.is_there(file)}
        except UserError as error:
            raise ConfigError(f"tasks.include: {error}") from None
        if large := next((file for file, size in sizes.items() if size > MAX_TASK), None):
            raise ConfigError(f"tasks.include: {large} is larger than {MAX_TASK >> 20} MiB, the limit of a task's YAML")
    columns: dict[str, str] = {}
    for name in tasks["names"]:
        if (other := columns.setdefault(column_name(name, "score"), name)) != name:
            raise ConfigError(f"tasks.names: {other} and {name} would share their columns; leave one out")
    for name in tasks["metrics"]:
        check_known(f"tasks.metrics: {name!r} is not among the names", name, tasks["names"])


def check_model(name: str, model: Mapping[str, Any], study: Mapping[str, Any], registry: Registry) -> None:
    """Check one model's formats against what is registered and its source against the disk."""
    for format in model["formats"]:
        built = registry.formats[study["variants"].get(format, {"format": format})["format"]]
        engine = registry.engines[built.engine]
        if registry.device != "auto" and registry.device not in {*built.devices} & {*engine.devices}:
            raise ConfigError(f"formats: {format} does not run on device {registry.device}; leave it out")
        for env in (built.env, engine.env):
            if why := registry.why_not_here(env):
                raise ConfigError(f"formats: {format} {why}")
    kind, path = source(model)
    if kind != "random" and study["reference"] not in model["formats"]:
        raise ConfigError(
            f"models.{name}: the reference {study['reference']!r} is not among its formats "
            f"({', '.join(model['formats'])}); add it, or name another reference"
        )
    if kind == "random":
        file = path / "config.json" if path.is_dir() else path
        if not plain_file.is_there(file):
            raise ConfigError(f"models.{name}.source.random: {file} does not exist; name a model's config.json")
    elif kind == "hub":
        return
    elif not path.is_dir():
        raise ConfigError(f"models.{name}.source: there is no folder {path}")
    elif not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"models.{name}.source: {path} cannot be read; change its permissions")
    elif not plain_file.is_there(path / "config.json"):
        raise ConfigError(f"models.{name}.source: {path} has no config.json, so it is not a model's folder")
    elif not any(plain_file.is_there(path / file) for file in WEIGHT_FILES):
        raise ConfigError(
            f"models.{name}.source: {path} has a config.json but no weights ({', '.join(WEIGHT_FILES)}); "
            f"download them, or measure its speed alone with source: {{random: {path}}}"
        )
