"""Classes of what rules/formats/*.smk and rules/engines/*.smk register: layouts, formats and engines."""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from quantmill.common.program import suggestion
from quantmill.plan.config_values import ConfigError
from quantmill.plan.resources import BuildResources, RunResources

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NAME = r"[a-z0-9][a-z0-9._-]*"
MAX_NAME = 100  # letters of a format or a run or, in the schema, a model: files made of names stay below 255 bytes
# known formats that are not built here, by the beginning of their names, and the reason
NOT_BUILT = {
    "eetq": "EETQ has no kernels for compute capability 9.0 and only a wheel for Python 3.10; use bnb-int8",
    "exl2": "ExLlamaV3 replaces ExLlamaV2, by the same author; use exl3-4.0bpw",
}
# names of a model's other files, and beginnings of its logs' names, which no artifact may have
TAKEN = r"(source|tensors|tensors\.json|safetensors|bin|mlc|tokens|latency|quality|loads|expected\.json)\Z"
TAKEN += r"|(expected-predictions|mlc-library)\Z"
TAKEN += r"|(imatrix|gguf-sensitivity|gguf-sensitivity\.json|published|tasks)\Z"
TAKEN += r"|(noise-floor|reference-logits|tokens-|latency-|quality-|loads-|tasks-|publish-)"


@dataclass(frozen=True)
class Layout:
    """Content of an artifact's folder.

    holds: a file, or a pattern, that each folder has. prebuilt: whether prebuilt artifacts are accepted, which
    fetch/prebuilt_layouts checks. hub_library: what loads it, by the hub's name.
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
    """A way to build an artifact.

    layout: a key of `LAYOUTS`, which decides the engines that can load it. engine: of its default run.
    env: the environment of its program. program: builds it, such as `build.ct2`.
    source: the model's folder that it reads: `fp16`, or `safetensors`, the checkpoint's own values.
    config: the config's key with its parameters, if it has any. parameters: those that the format fixes.
    calibrated: whether it needs the calibration text.
    inputs: further files, by the names of the program's flags. flags: further flags. Both are functions of the job's
    wildcards, `model` and `artifact`. logs: of further jobs that it depends on.
    devices: that it can be built and run on. gpu: whether its program uses a GPU. threads: that it uses, at most.
    priority: of its job; None: 0 if it is calibrated, else 10.
    gate_env: the environment that reads its weights for the quality gate.
    resources: memory, disk and time; `make plan` shows "unknown" without them.
    """

    layout: str
    engine: str
    env: str
    program: str
    source: str = "fp16"
    config: str = ""
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

    def gpus(self, available: int) -> int:
        """Return the number of GPUs that its build may use of those available."""
        placements = self.resources.placements if self.resources and self.calibrated else ()
        return available if any(each.shared for each in placements) else 1


@dataclass(frozen=True)
class Engine:
    """An engine, which runs artifacts: scripts/quantmill/engines/NAME.py, with `_` for `-`.

    implementation: of an engine without a module of its own, the one that runs it. `quantized` runs what transformers
    loads by the quantization_config of its config.json; such an engine has the name of its library's package.
    env: its environment; one without pins (envs/ENV.txt) is the user's own, which `interpreters` names.
    loads: layouts. multi_gpu: whether it can use several GPUs.
    options: name -> JSON schema of its value; None accepts any option of the engine.
    python: the only version, such as 3.11, that its environment can be built with; None for any.
    serves: whether it is a server, which loads can be sent to. slots: the option for requests in parallel, if the
    server answers one at a time without it. attached: whether the user starts it, at a run's url.
    no_speed: the reason why its speed is not measured, if the speed differs from that of a deployment.
    resources: memory and time; `make plan` shows "unknown" without them.
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
    """Everything registered, and what this machine has.

    envs: environments with pins. interpreters: those that the config names a Python for.
    device: the meaning of `auto` here, or `auto` if jobs run elsewhere. gpus: the limit of --resources gpu=.
    """

    formats: Mapping[str, Format]
    engines: Mapping[str, Engine]
    layouts: Mapping[str, Layout]
    envs: Collection[str]
    interpreters: Collection[str] = ()
    device: str = "auto"
    gpus: int | None = None

    def layout(self, name: str, study: Mapping[str, Any], model: Mapping[str, Any]) -> str:
        """Return the layout of a format, a variant or a model's prebuilt artifact; empty for an unknown name."""
        if name in model.get("prebuilt", {}):
            return model["prebuilt"][name]["layout"]
        base = study["variants"].get(name, {"format": name})["format"]
        return self.formats[base].layout if base in self.formats else ""

    def prebuilt_engine(self, prebuilt: Mapping[str, Any]) -> str:
        """Return the engine that a prebuilt artifact names, or that of the first format with its layout."""
        layout = prebuilt["layout"]
        return prebuilt.get("engine") or next(each.engine for each in self.formats.values() if each.layout == layout)

    def why_not_here(self, env: str) -> str | None:
        """Return why an environment is not available, and a remedy; None if it is."""
        if env in self.interpreters:
            return None
        if env not in self.envs:
            return f"{env} is not built here; name a python that has it under interpreters.{env}"
        wanted = next((each.python for each in self.engines.values() if each.env == env and each.python), None)
        if wanted in (None, PYTHON):
            return None
        return (
            f"needs Python {wanted}, and this is {PYTHON}; remove it, name a Python that has it in "
            f"interpreters.{env}, or rebuild .venv with PYTHON=python{wanted}"
        )


def entry(kind: type, words: Mapping[str, Any]) -> Any:
    """Make a `Format`, `Layout` or `Engine`. Raises `ConfigError` for a missing or an unknown word."""
    names = {each.name: each for each in fields(kind)}
    for word in words:
        check_known(f"{kind.__name__} has no field {word!r}", word, names)
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
    """Raise `ConfigError` for the first engine or format that is incomplete.

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
        where = f"format {name!r}"
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"{where}: a name is small letters, digits, '.', '_' and '-'; rename it")
        if len(name) > MAX_NAME:
            raise ConfigError(f"{where}: a name has at most {MAX_NAME} letters; rename it")
        check_known(f"{where}: the pins of its environment, envs/{format.env}.txt, are missing", format.env, envs)
        check_known(f"{where}: no file registers its engine {format.engine!r}", format.engine, engines)
        check_known(f"{where}: there is no layout {format.layout!r}", format.layout, layouts)
        loads = engines[format.engine].loads
        check_known(
            f"{where}: its engine {format.engine} does not load the layout {format.layout!r}", format.layout, loads
        )
        check_known(f"{where}: there is no program {format.program!r}", format.program, programs)


def check_known(mistake: str, word: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for a word that is not known, with a suggestion."""
    if word not in known:
        raise ConfigError(mistake + suggestion(word, known))


def unknown_format(name: str, known: Collection[str]) -> str:
    """Format the error for a format that is not registered."""
    if reason := NOT_BUILT.get(name.partition("-")[0]):
        return f"{name} is not built here: {reason}"
    return f"unknown format {name!r}{suggestion(name, known)}"
