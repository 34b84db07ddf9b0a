"""Checks of vLLM's parallel sizes and draft models, before it loads anything."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from quantmill.build.quantizer import GROUP_SIZES
from quantmill.plan.cells import artifacts
from quantmill.plan.config_values import ConfigError
from quantmill.plan.model_source import local_config, read_config, source
from quantmill.plan.registry import Registry
from quantmill.servers.vllm_options import SIZES, value

ENGINES = ("vllm", "vllm-serve")
SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
WIDTHS = ("intermediate_size", "num_attention_heads x head_dim")  # inputs of layers that are split across groups
MOST = 64  # GPUs of a run, as in the schema


def check(study: Mapping[str, Any], registry: Registry) -> None:
    """Raise `ConfigError` for the first run of vLLM whose sizes do not fit its GPUs or a model, or whose draft is its
    target. A model of the hub is not checked."""
    for name, run in study["runs"].items():
        if run["engine"] not in ENGINES:
            continue
        where = f"runs.{name}"
        tensor, stages = check_cards(where, run, registry.device)
        for model in study["models"]:
            config, served = local_config(study["models"][model]), served_by(run, study, model)
            depth = config.get("num_hidden_layers")
            if served and is_count(depth) and stages > depth:
                raise ConfigError(f"{where}: {SIZES[1]} {stages}, and {model} has {depth} layers; {depth} fit at most")
            for format in served:
                check_tensor(where, model, config, tensor, group_size(format, model, config, study, registry))
        check_draft(f"{where}.options.speculative_config", run, study)


def served_by(run: Mapping[str, Any], study: Mapping[str, Any], model: str) -> list[str]:
    """List the artifacts of a model in a run."""
    return [name for name in artifacts(study, study["models"][model]) if name in run["formats"]]


def check_cards(where: str, run: Mapping[str, Any], device: str) -> tuple[int, int]:
    """Tensor and pipeline parallel size of a run. Raises `ConfigError` unless all sizes multiply to its GPUs; a CPU is
    not checked."""
    given = {name: size for name in SIZES if (size := value(run["options"], name)) is not None}
    for name, size in given.items():
        if not is_count(size):
            raise ConfigError(f"{where}.options.{name}: {size!r} is not a size; write a whole number of 1 or more")
    tensor = given.get(SIZES[0], max(1, run["gpus"] // prod(given.values())))
    wanted = prod((given | {SIZES[0]: tensor}).values())
    if wanted != run["gpus"] and device != "cpu":
        sizes = " x ".join(f"{name} {size}" for name, size in given.items())
        raise ConfigError(
            f"{where}: {sizes} {'take' if len(given) > 1 else 'takes'} {wanted} GPUs, and gpus is {run['gpus']}; "
            f"set gpus: {wanted}{'' if run['gpus'] == 1 else ', or other sizes'}"
        )
    return tensor, given.get(SIZES[1], 1)


def is_count(size: Any) -> TypeGuard[int]:
    return type(size) is int and size >= 1


def check_tensor(where: str, model: str, config: Mapping[str, Any], size: int, group: int | None) -> None:
    """Raise `ConfigError` for a tensor parallel size that does not fit a model, with those that do."""
    if why := misfit(config, size, group):
        fits = [str(each) for each in range(1, MOST + 1) if not misfit(config, each, group)]
        raise ConfigError(f"{where}: {SIZES[0]} {size} does not fit {model}'s {why}; sizes that fit: {', '.join(fits)}")


def misfit(config: Mapping[str, Any], size: int, group: int | None) -> str | None:
    """Return the part of a model that vLLM cannot split by `size`; None if it can, or the model's sizes are unknown."""
    heads = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads") or heads
    if not is_count(heads) or not is_count(keys):
        return None
    if heads % size:
        return f"{heads} attention heads"
    if keys % size and size % keys:
        return f"{keys} key-value heads"
    for name, width in widths(config).items() if group and size > 1 else ():
        if group and width % (size * group):
            return f"{name} of {width} in groups of {group}"
    return None


def widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the inputs of the layers that are split across groups. A mixture's experts may stay whole."""
    heads, hidden = config["num_attention_heads"], config.get("hidden_size")
    head = config.get("head_dim") or (hidden // heads if is_count(hidden) else None)
    inner = None if any("experts" in key for key in config) else config.get("intermediate_size")
    found = dict(zip(WIDTHS, (inner, heads * head if is_count(head) else None), strict=True))
    return {name: width for name, width in found.items() if is_count(width)}


def group_size(
    format: str, model: str, config: Mapping[str, Any], study: Mapping[str, Any], registry: Registry
) -> int | None:
    """Return the weights that share a scale in an artifact; None if it is not quantized, or not known yet."""
    words = study["models"][model]
    if format in words["prebuilt"]:
        theirs = words["prebuilt"][format].get("path")
        about = read_config(Path(theirs) / "config.json").get("quantization_config") if theirs else None
        found = about.get("group_size") if isinstance(about, dict) else None
        return found if is_count(found) else None
    if registry.layout(format, study, words) not in ("gptq", "awq"):
        return None
    variant = study["variants"].get(format, {"format": format})
    parameters = study.get(registry.formats[variant["format"]].config, {}) | variant
    asked = next((size for key, size in parameters.items() if key.endswith("group_size")), "auto")
    if asked != "auto":
        return int(asked)
    inputs = [
        config.get("hidden_size"),
        *(widths(config).values() if is_count(config.get("num_attention_heads")) else ()),
    ]
    return next((size for size in GROUP_SIZES if all(is_count(each) and each % size == 0 for each in inputs)), None)


def check_draft(where: str, run: Mapping[str, Any], study: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a draft model that is its target. vLLM refuses everything else itself."""
    words = speculation(run["options"])
    model = words.get("model")
    if isinstance(model, str) and not is_in_target(words) and (target := own(model, run, study)):
        raise ConfigError(
            f"{where}.model: {model} is {target}, a target used as its own draft; name a smaller model of its family"
        )


def speculation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the settings of a run's speculation from all options that vLLM accepts for them."""
    given = value(options, "speculative_config")
    found = {str(name).replace("-", "_"): each for name, each in given.items()} if isinstance(given, dict) else {}
    for option, each in options.items():
        first, _, name = option.replace("-", "_").partition(".")
        if name and first == "speculative_config":
            found[name] = each
        elif first in SHORT:
            found[SHORT[first]] = each
    return found


def is_in_target(words: Mapping[str, Any]) -> bool:
    """Return whether a speculation's draft is part of its target's checkpoint, by vLLM's names of methods."""
    return str(words.get("method")).endswith("mtp") or words.get("method") == "dspark"


def speculates_by_itself(run: Mapping[str, Any]) -> bool:
    """Return whether a run's draft is part of its target's checkpoint: layers that nothing else uses."""
    return run["engine"] in ENGINES and is_in_target(speculation(run["options"]))


def own(draft: str, run: Mapping[str, Any], study: Mapping[str, Any]) -> str | None:
    """Name the target that a draft equals: a model's source or an artifact in the run; None for another model."""
    for name, model in study["models"].items():
        served = served_by(run, study, name)
        if not served:
            continue
        kind, path = source(model)
        if draft == str(path) if kind == "hub" else same(draft, path):
            return f"{name}'s own source"
        for each in ("source", "safetensors", *served):
            theirs = model["prebuilt"].get(each, {})
            if same(draft, Path("artifacts") / name / each) or draft == theirs.get("hub"):
                return f"{name}'s own artifact"
            if "path" in theirs and same(draft, Path(theirs["path"])):
                return f"{name}'s own artifact"
    return None


def same(one: str, other: Path) -> bool:
    return Path(one).resolve() == other.resolve()
