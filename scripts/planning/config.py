"""Check a config at parse time, so that a mistake costs one line and a second instead of an hour of jobs."""

import difflib
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import jsonschema

from common import plain_text
from planning.costs import Costs
from planning.values import ConfigError, check_values

Makers = Callable[[str], Mapping[str, str]]  # a format's name -> the rules that make its artifact: name -> file
FORMAT_NAME = r"[a-z0-9][a-z0-9._-]*"
MAX_NAME = 100  # letters of a format or, in the schema, a model: files made of names have to stay below 255 bytes
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
WEIGHT_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)

# kind of text -> where it lies by default: in the repository, and for a model of the hub on the hub, pinned to a commit
TEXTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "prompts": ("config/prompts.txt", None),
    "evaluation": (
        "config/evaluation.txt",
        {  # WikiText-2 raw, test
            "hub": "Salesforce/wikitext",
            "revision": "b08601e04326c79dfdd32d625aee71d232d685c3",
            "file": "wikitext-2-raw-v1/test-00000-of-00001.parquet",
        },
    ),
    "calibration": (
        "config/calibration.txt",
        {  # C4, which shares nothing with WikiText
            "hub": "allenai/c4",
            "revision": "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
            "file": "en/c4-validation.00000-of-00008.json.gz",
            "documents": 2000,
        },
    ),
}


@dataclass(frozen=True)
class Format:
    """What rules/formats/NAME.smk registers: the environment and engine that run it, and where it can run.

    `python` is the one version, such as 3.11, that its environment can be built with; None for any. `parameters` is
    the config's key that holds its tool's, `costs` what it takes; None where nobody said.
    """

    env: str
    engine: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    python: str | None = None
    parameters: str | None = None
    costs: Costs | None = None


def registered(words: Mapping[str, Any]) -> Format:
    """`Format` of these words. Raises `ConfigError` for one that it lacks, or does not know."""
    known = {field.name: field for field in fields(Format)}
    for word in words:
        if word not in known:
            raise ConfigError(f"Format knows no {word!r}{nearest(word, known)}")
    for name, field in known.items():
        if field.default is MISSING and name not in words:
            raise ConfigError(f"Format lacks {name!r}; write Format(env=..., engine=...)")
    return Format(**words)


def check_formats(
    formats: Mapping[str, Format], envs: Collection[str], engines: Collection[str], makers: Makers
) -> None:
    """Check what rules/formats/*.smk registered. Raises `ConfigError` for the first format that lacks something.

    Args:
        engines: modules of scripts/engines that hold a class Engine. makers: see `Makers`.
    """
    for name, format in formats.items():
        if not re.fullmatch(FORMAT_NAME, name):
            raise ConfigError(f"format {name!r}: a name is small letters, digits, '.', '_' and '-'; rename it")
        if len(name) > MAX_NAME:
            raise ConfigError(f"format {name!r}: a name has at most {MAX_NAME} letters; rename it")
        if format.env not in envs:
            raise ConfigError(
                f"format {name!r}: the pins of its environment, envs/{format.env}.txt, are missing"
                f"{nearest(format.env, envs)}"
            )
        if format.engine not in engines:
            raise ConfigError(
                f"format {name!r}: its engine, scripts/engines/{format.engine}.py with a class Engine, is missing"
                f"{nearest(format.engine, engines)}"
            )
        rules = makers(name)
        if not rules:
            raise ConfigError(
                f"format {name!r}: a rule that makes it is missing; "
                f'its output is to be directory("artifacts/{{model}}/{name}")'
            )
        if len(rules) > 1:
            raise ConfigError(
                f"format {name!r}: made by the rules {' and '.join(sorted(rules))}; where an output has {{format}}, "
                "the rule's wildcard_constraints say which formats it makes"
            )


def nearest(word: str, known: Collection[str]) -> str:
    """`; did you mean 'x'?` where something known is close, else `; known: …`."""
    words = [str(each) for each in known]
    close = difflib.get_close_matches(str(word), words, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(words))}"


def unknown(name: str, formats: Collection[str], makers: Makers) -> str:
    """That no file registers a format; where one has a rule that makes it, that this is what it forgot."""
    file = next(iter(makers(name).values()), None)
    forgotten = f"; {file} makes it, but FORMATS[{name!r}] = Format(env=..., engine=...) is missing there"
    return f"unknown format {name!r}{forgotten if file else nearest(name, formats)}"


def checked(
    config: Mapping[str, Any],
    schema: Mapping[str, Any],
    formats: Mapping[str, Format],
    envs: Collection[str],
    makers: Makers = lambda format: {},
) -> dict[str, Any]:
    """The config with the schema's defaults filled in. Raises `ConfigError` for the first thing that cannot be."""
    check_values(config)
    present = {key: value for key, value in config.items() if value is not None}  # `key:` alone means its default
    models = present.get("models")
    for name in models if isinstance(models, dict) else ():
        if not isinstance(name, str):
            raise ConfigError(f"models: the name {name!r} is no text to YAML; put it in quotes")
    filled = with_defaults(deepcopy(present), schema, schema)
    validator = jsonschema.Draft202012Validator(schema)
    errors = sorted(validator.iter_errors(filled), key=lambda error: (len(error.absolute_path), str(error.path)))
    if errors:
        raise ConfigError(describe(errors[0]))
    for name, interpreter in filled["interpreters"].items():
        if name not in envs:
            raise ConfigError(f"interpreters: no environment is called {name!r}{nearest(name, envs)}")
        if shutil.which(interpreter) is None:
            raise ConfigError(f"interpreters.{name}: {interpreter} is no program; name a python that is there")
    if filled["mlc"]["tool"] == "mlc_llm" and "mlc_llm" not in filled["interpreters"]:
        raise ConfigError("mlc.tool: mlc_llm is not built here; name a python that has it under interpreters.mlc_llm")
    if filled["reference"] not in formats:
        raise ConfigError(f"reference: {unknown(filled['reference'], formats, makers)}")
    for name, model in filled["models"].items():
        model.setdefault("formats", filled["formats"])
        for format in model["formats"]:
            if format not in formats:
                raise ConfigError(f"formats: {unknown(format, formats, makers)}")
        try:
            check_model(name, model, filled, formats)
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
    return filled


def with_defaults(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Fill a mapping's missing keys from the `default`s of its schema, in place, deep; all in the schema's order and
    numbers of its type, so that a default that is written out is no other parameter of a job."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if isinstance(value, dict):
        for key, child in schema.get("properties", {}).items():
            if key not in value and "default" in child:
                value[key] = deepcopy(child["default"])
            if key in value:
                value[key] = with_defaults(value.pop(key), child, root)
    kind = schema.get("type")
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def describe(error: jsonschema.ValidationError) -> str:
    """A schema error in one line that starts with the key."""
    where = ".".join(map(str, error.absolute_path)) or "config"
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema.get("properties", {})
        unknown = next(key for key in error.instance if key not in known)
        return f"{where}: unknown key {unknown!r}{nearest(str(unknown), known)}"
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        return f"{where}: {missing!r} is missing"
    if error.validator == "enum" and isinstance(error.instance, str):
        return f"{where}: {error.instance!r} is not possible{nearest(error.instance, error.validator_value)}"
    reason = error.schema.get("description") if error.validator in {"pattern", "oneOf"} else None
    return f"{where}: {reason or error.message}".replace("\n", " ")


def check_text(key: str, path: Path) -> None:
    """A text file of the config must be there and hold something that can be tokenised."""
    try:
        if not path.is_file():
            raise ConfigError(f"{key}: {path} is not there; name a text file")
        plain_text.read(path)
    except plain_text.NotPlain as error:
        raise ConfigError(f"{key}: {path} {error}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}; name a text file") from None


def check_model(name: str, model: Mapping[str, Any], config: Mapping[str, Any], formats: Mapping[str, Format]) -> None:
    """Check one model's formats against what is registered and its source against the disk."""
    for format in model["formats"]:
        if config["device"] != "auto" and config["device"] not in formats[format].devices:
            raise ConfigError(f"formats: {format} does not run on device {config['device']}; leave it out")
        env, wanted = formats[format].env, formats[format].python
        if wanted not in (None, PYTHON) and env not in config["interpreters"]:
            raise ConfigError(
                f"formats: {format} wants Python {wanted}, and this is {PYTHON}; leave it out, name a Python that has "
                f"it in interpreters.{env}, or make .venv anew with PYTHON=python{wanted}"
            )
    kind, path = source(model)
    if kind != "random" and config["reference"] not in model["formats"]:
        raise ConfigError(
            f"models.{name}: the reference {config['reference']!r} is not among its formats "
            f"({', '.join(model['formats'])}); add it, or name another reference"
        )
    if kind == "random":
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"models.{name}.source.random: {file} is not there; name a model's config.json")
    elif kind == "hub":
        return
    elif not path.is_dir():
        raise ConfigError(f"models.{name}.source: there is no folder {path}")
    elif not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"models.{name}.source: {path} may not be read; change its permissions")
    elif not (path / "config.json").is_file():
        raise ConfigError(f"models.{name}.source: {path} holds no config.json, so it is no model's folder")
    elif not any((path / file).is_file() for file in WEIGHT_FILES):
        raise ConfigError(
            f"models.{name}.source: {path} holds a config.json but no weights ({', '.join(WEIGHT_FILES)}); "
            f"download them, or measure its speed alone with source: {{random: {path}}}"
        )


def source(model: Mapping[str, Any]) -> tuple[str, Path]:
    """Kind (`demo`, `path`, `random`, `hub`) and path of a model's source; of the hub's, the repository's name."""
    if model["source"] == "demo":
        return "demo", Path("demo")
    kind = next(kind for kind in ("path", "random", "hub") if kind in model["source"])
    return kind, Path(model["source"][kind])
