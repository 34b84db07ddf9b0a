"""What rules/formats/*.smk and rules/engines/*.smk register: formats that are built, and engines that run them."""

import difflib
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from quantmill.plan.config_values import ConfigError
from quantmill.plan.resources import BuildResources, RunResources

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NAME = r"[a-z0-9][a-z0-9._-]*"
MAX_NAME = 100  # letters of a format or a run or, in the schema, a model: files made of names stay below 255 bytes
# formats that people know and that nothing here builds, by what their names begin with, and why
NOT_BUILT = {
    "eetq": "EETQ's kernels end before compute capability 9.0, and its one wheel is for Python 3.10; take bnb-int8",
    "exl2": "ExLlamaV2 gave way to ExLlamaV3, by the same author; take exl3-4.0bpw",
}
# names of a model's other files, and what its logs begin with: no artifact may have them
TAKEN = r"(source|tensors|tensors\.json|safetensors|bin|mlc|tokens|latency|quality|loads|expected\.json)\Z"
TAKEN += r"|(expected-predictions|mlc-library)\Z"
TAKEN += r"|(imatrix|gguf-sensitivity|gguf-sensitivity\.json|published|tasks)\Z"
TAKEN += r"|(noise-floor|reference-logits|tokens-|latency-|quality-|loads-|tasks-|publish-)"


@dataclass(frozen=True)
class Layout:
    """What lies in an artifact's folder.

    holds: a file, or a pattern, that each folder has. prebuilt: whether artifacts of others are taken (and checked by
    fetch/prebuilt_layouts). hub_library: what loads it, in the hub's words.
    """

    holds: str
    prebuilt: bool = True
    hub_library: str = "transformers"


PACKED = Layout("config.json")  # safetensors with a quantization_config
LAYOUTS = {
    "hf": Layout("config.json", prebuilt=False),
    **dict.fromkeys(("gptq", "awq", "compressed-tensors", "bitsandbytes", "torchao"), PACKED),
    "hqq": replace(PACKED, hub_library="hqq"),
    "exl3": replace(PACKED, hub_library="exllamav3"),
    "ct2": Layout("model.bin", hub_library="ctranslate2"),
    "gguf": Layout("*.gguf", hub_library="gguf"),
    "mlc": Layout("mlc-chat-config.json", prebuilt=False, hub_library="mlc-llm"),
}


@dataclass(frozen=True)
class Format:
    """How an artifact is built.

    layout: a key of `LAYOUTS`; says which engines can load it. engine: the engine of its default run.
    env: the environment of its program. program: what builds it, such as `build.ct2`.
    source: the model's folder that it reads: `fp16`, or `safetensors`, which is as the author published it.
    config: the config's key that holds its parameters, where it has any. parameters: those that the format fixes.
    calibrated: whether it is built from the calibration text.
    inputs: further files, by the names of the program's flags. flags: further flags. Both are functions of the job's
    wildcards, `model` and `artifact`. logs: of jobs that it is made from and other formats are not.
    devices: where it can be built and run. gpu: whether its program uses a GPU. threads: that it uses, at most.
    priority: of its job; None: 0 for what is calibrated, 10 for the rest.
    gate_env: the environment that reads its weights for the quality gate.
    resources: what it takes; None where nobody said, and then `make plan` says so.
    """

    layout: str
    engine: str
    env: str
    program: str
    source: str = "fp16"
    config: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = False
    inputs: Callable[[Any], Mapping[str, Any]] | None = None
    flags: Callable[[Any], Mapping[str, Any]] | None = None
    logs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    gpu: bool = True
    threads: int = 8
    priority: int | None = None
    gate_env: str = "torch"
    resources: BuildResources | None = None


@dataclass(frozen=True)
class Engine:
    """What runs an artifact: scripts/quantmill/engines/NAME.py, with `_` for `-`.

    implementation: of an engine without a module of its own, the one that runs it. `quantized` runs what transformers
    loads by the quantization_config of its config.json; such an engine has the name of its library's package.
    env: its environment; one without pins (envs/ENV.txt) is the user's own, which `interpreters` names.
    loads: the layouts that it loads. multi_gpu: whether it can use several GPUs.
    options: name -> JSON schema of its value; None takes any option, in the engine's own words.
    python: the one version, such as 3.11, that its environment can be built with; None for any.
    serves: whether it is a server, which can be put under loads. slots: of a server that answers one request at a time
    unless an option says how many, this option. attached: whether its user runs it, at a run's url.
    no_speed: why its speed is not measured, where it says nothing of what people deploy.
    resources: what it takes; None where nobody said.
    """

    env: str
    loads: Collection[str]
    implementation: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    multi_gpu: bool = False
    options: Mapping[str, Mapping[str, Any]] | None = field(default_factory=dict)
    python: str | None = None
    serves: bool = False
    slots: str | None = None
    attached: bool = False
    no_speed: str = ""
    resources: RunResources | None = None

    def module(self, name: str) -> str:
        """Return the module in engines/ of the engine of this name."""
        return self.implementation or name.replace("-", "_")


@dataclass(frozen=True)
class Registry:
    """What is registered and what is there.

    envs: environments with pins. interpreters: those that the config names a Python for.
    device: what `auto` means here, or `auto` where jobs run elsewhere. gpus: what --resources gpu= allows.
    """

    formats: Mapping[str, Format]
    engines: Mapping[str, Engine]
    layouts: Mapping[str, Layout]
    envs: Collection[str]
    interpreters: Collection[str] = ()
    device: str = "auto"
    gpus: int | None = None

    def layout(self, name: str, study: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
        """The layout of a format, a variant or one of a model's prebuilt artifacts; None for an unknown name."""
        if name in model.get("prebuilt", {}):
            return model["prebuilt"][name]["layout"]
        base = study["variants"].get(name, {"format": name})["format"]
        return self.formats[base].layout if base in self.formats else None

    def prebuilt_engine(self, prebuilt: Mapping[str, Any]) -> str:
        """The engine that a prebuilt artifact names, or that of the first format that has its layout."""
        layout = prebuilt["layout"]
        return prebuilt.get("engine") or next(each.engine for each in self.formats.values() if each.layout == layout)

    def why_not_here(self, env: str) -> str | None:
        """Why an environment cannot be had, and what to do; None where it can."""
        if env in self.interpreters:
            return None
        if env not in self.envs:
            return f"{env} is not built here; name a python that has it under interpreters.{env}"
        wanted = next((each.python for each in self.engines.values() if each.env == env and each.python), None)
        if wanted in (None, PYTHON):
            return None
        return (
            f"wants Python {wanted}, and this is {PYTHON}; leave it out, name a Python that has "
            f"it in interpreters.{env}, or make .venv anew with PYTHON=python{wanted}"
        )


def entry(kind: type, words: Mapping[str, Any]) -> Any:
    """A `Format` or an `Engine` of these words. Raises `ConfigError` for a word that it lacks, or does not know."""
    names = {each.name: each for each in fields(kind)}
    for word in words:
        if word not in names:
            raise ConfigError(f"{kind.__name__} knows no {word!r}{suggestion(word, names)}")
    wanted = [name for name, each in names.items() if each.default is MISSING and each.default_factory is MISSING]
    for name in wanted:
        if name not in words:
            raise ConfigError(
                f"{kind.__name__} lacks {name!r}; write {kind.__name__}({', '.join(f'{each}=...' for each in wanted)})"
            )
    return kind(**words)


def check_registry(
    formats: Mapping[str, Format],
    engines: Mapping[str, Engine],
    layouts: Collection[str],
    envs: Collection[str],
    modules: Collection[str],
    programs: Collection[str],
) -> None:
    """Raises `ConfigError` for the first engine or format that lacks something.

    Args:
        envs: environments with pins. modules: names of the modules in engines/. programs: names of all programs.
    """
    for name, engine in engines.items():
        module = engine.module(name)
        if engine.implementation and name.replace("-", "_") in modules:
            raise ConfigError(f"engine {name!r}: it has a module of its own; leave implementation={module!r} out")
        if module not in modules:
            raise ConfigError(f"engine {name!r}: scripts/quantmill/engines/{module}.py is missing")
    for name, format in formats.items():
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"format {name!r}: a name is small letters, digits, '.', '_' and '-'; rename it")
        if len(name) > MAX_NAME:
            raise ConfigError(f"format {name!r}: a name has at most {MAX_NAME} letters; rename it")
        if format.env not in envs:
            raise ConfigError(
                f"format {name!r}: the pins of its environment, envs/{format.env}.txt, are missing"
                f"{suggestion(format.env, envs)}"
            )
        if format.engine not in engines:
            raise ConfigError(
                f"format {name!r}: no file registers its engine {format.engine!r}{suggestion(format.engine, engines)}"
            )
        if format.layout not in layouts:
            raise ConfigError(
                f"format {name!r}: there is no layout {format.layout!r}{suggestion(format.layout, layouts)}"
            )
        if format.layout not in engines[format.engine].loads:
            raise ConfigError(
                f"format {name!r}: its engine {format.engine} does not load the layout {format.layout!r}"
                f"{suggestion(format.layout, engines[format.engine].loads)}"
            )
        if format.program not in programs:
            raise ConfigError(
                f"format {name!r}: there is no program {format.program!r}{suggestion(format.program, programs)}"
            )


def unknown_format(name: str, known: Collection[str]) -> str:
    """What is said of a format that is not registered."""
    if reason := NOT_BUILT.get(name.partition("-")[0]):
        return f"{name} is not built here: {reason}"
    return f"unknown format {name!r}{suggestion(name, known)}"


def suggestion(word: str, known: Collection[str]) -> str:
    """`; did you mean 'x'?` where something known is close, else `; known: …`."""
    words = [str(each) for each in known]
    close = difflib.get_close_matches(str(word), words, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(words))}"
