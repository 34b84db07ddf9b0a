"""What rules/formats/*.smk and rules/engines/*.smk register: formats that are built, and engines that run them."""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from quantmill.plan.config_values import ConfigError
from quantmill.plan.resources import BuildResources, RunResources

NAME = r"[a-z0-9][a-z0-9._-]*"
MAX_NAME = 100  # letters of a format or a run or, in the schema, a model: files made of names stay below 255 bytes
# formats that people know and that nothing here builds, by what their names begin with, and why
NOT_BUILT = {
    "eetq": "EETQ's kernels end before compute capability 9.0, and its one wheel is for Python 3.10; take bnb-int8",
    "exl2": "ExLlamaV2 gave way to ExLlamaV3, by the same author; take exl3-4.0bpw",
}
# names of a model's other files, and what its logs begin with: no artifact may have them
TAKEN = r"(source|tensors|tensors\.json|safetensors|bin|mlc|tokens|latency|quality|serving|gate\.json)\Z"
TAKEN += r"|(expected-predictions|mlc-library)\Z"
TAKEN += r"|(imatrix|gguf-sensitivity|gguf-sensitivity\.json|published|tasks)\Z"
TAKEN += r"|(noise-floor|reference-logits|tokens-|latency-|quality-|serving-|tasks-|publish-)"
CALIBRATION = "tokens-calibration"  # the log of what cuts the calibration text
Makers = Callable[[str], Collection[str]]  # a format's name -> names of the rules that make its artifact


@dataclass(frozen=True)
class Format:
    """How an artifact is built.

    layout: what lies on the disk, by the ecosystem's name (`hf`, `gptq`, …); says which engines can load it.
    engine: the engine of its default run. env: the environment of the program that builds it.
    parameters: the config's key that holds its parameters, where it has any.
    logs: of jobs that it is made from and other formats are not, such as `tokens-calibration`.
    quantizer: the program that the rule `quantize` builds it with, and its flags; none where it has a rule of its own.
    costs: what it takes; None where nobody said, and then `make plan` says so.
    """

    layout: str
    engine: str
    env: str
    parameters: str | None = None
    logs: tuple[str, ...] = ()
    quantizer: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    costs: BuildResources | None = None

    @property
    def calibrated(self) -> bool:
        """Whether it is built from a calibration text."""
        return CALIBRATION in self.logs


@dataclass(frozen=True)
class Engine:
    """What runs an artifact: scripts/engines/NAME.py, with `_` for `-`.

    env: its environment; one without pins (envs/ENV.txt) is the user's own, which `interpreters` names.
    loads: the layouts that it loads. many_gpus: whether it can use several GPUs.
    options: name -> JSON schema of its value; None takes any option, in the engine's own words.
    python: the one version, such as 3.11, that its environment can be built with; None for any.
    serves: whether it is a server, which can be put under loads. slots: of a server that answers one request at a time
    unless an option says how many, this option. attached: whether its user runs it, at a run's url.
    no_speed: why its speed is not measured, where it says nothing of what people deploy.
    costs: what it takes; None where nobody said.
    """

    env: str
    loads: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    many_gpus: bool = False
    options: Mapping[str, Mapping[str, Any]] | None = field(default_factory=dict)
    python: str | None = None
    serves: bool = False
    slots: str | None = None
    attached: bool = False
    no_speed: str = ""
    costs: RunResources | None = None


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
    envs: Collection[str],
    modules: Collection[str],
    makers: Makers,
) -> None:
    """Raises `ConfigError` for the first engine or format that lacks something.

    Args:
        envs: environments with pins. modules: names of the modules in scripts/engines. makers: see `Makers`.
    """
    for name in engines:
        if name.replace("-", "_") not in modules:
            raise ConfigError(f"engine {name!r}: scripts/engines/{name.replace('-', '_')}.py is missing")
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
        if format.layout not in engines[format.engine].loads:
            raise ConfigError(
                f"format {name!r}: its engine {format.engine} does not load the layout {format.layout!r}"
                f"{suggestion(format.layout, engines[format.engine].loads)}"
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
