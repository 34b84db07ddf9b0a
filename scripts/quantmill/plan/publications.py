"""Repositories of the hub that a study publishes to: one an artifact, and one for all GGUF files of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantmill.plan import cells
from quantmill.plan.config_values import ConfigError
from quantmill.plan.model_source import source
from quantmill.plan.registry import Registry, unknown_format

GGUF = "GGUF"  # replaces {format} in the repository of a model's GGUF files; no artifact has capital letters
MAX_NAME = 96  # letters of a repository's name, as the hub counts


@dataclass(frozen=True)
class Publication:
    """A repository and the artifacts of a model that go there. `name`: of its receipt."""

    repository: str
    model: str
    name: str
    layout: str
    artifacts: tuple[str, ...]


def of_study(study: Mapping[str, Any], registry: Registry) -> list[Publication]:
    """List what a study publishes, in the order of its models and formats.

    Raises:
        ConfigError: a format is unknown or prebuilt, weights are random, or two artifacts would share a repository.
    """
    words = study.get("publish")
    if words is None:
        return []
    found: dict[tuple[str, str], Publication] = {}
    for model in study["models"]:
        for artifact in artifacts(study, model, words["formats"]):
            layout = registry.layout(artifact, study, study["models"][model])
            name = GGUF if layout == "gguf" else artifact
            others = found[model, name].artifacts if (model, name) in found else ()
            repository = words["repository"].replace("{model}", model).replace("{format}", name)
            found[model, name] = Publication(repository, model, name, layout, (*others, artifact))
    check(study, registry, found.values())
    return list(found.values())


def artifacts(study: Mapping[str, Any], model: str, formats: list[str]) -> list[str]:
    """List the artifacts of a model that the study publishes."""
    names = [each for each in cells.artifacts(study, study["models"][model]) if each in formats]
    for name in names:
        if name in study["models"][model]["prebuilt"]:
            raise ConfigError(f"publish.formats: {name} is prebuilt; remove it")
    if names and source(study["models"][model])[0] == "random":
        raise ConfigError(
            f"publish.formats: {model} has random weights, which cannot be published; remove it from publish.formats"
        )
    return names


def check(study: Mapping[str, Any], registry: Registry, found: Any) -> None:
    """Raise `ConfigError` for formats that no model has, and for repositories that are invalid or shared."""
    words = study["publish"]
    published = {artifact for each in found for artifact in each.artifacts}
    for format in words["formats"]:
        if format not in published:
            names = [*registry.formats, *study["variants"]]
            why = f"no model has {format}; add it to formats" if format in names else unknown_format(format, names)
            raise ConfigError(f"publish.formats: {why}")
    taken: dict[str, Publication] = {}
    for each in found:
        if len(each.repository.partition("/")[2]) > MAX_NAME:
            raise ConfigError(f"publish.repository: {each.repository} has over {MAX_NAME} letters; shorten it")
        other = taken.setdefault(each.repository.lower(), each)
        if other is not each:
            raise ConfigError(
                f"publish.repository: {other.model}'s {other.name} and {each.model}'s {each.name} would share "
                f"{each.repository}; write {{model}} and {{format}} into it"
            )
    if "base_model" in words and len({each.model for each in found}) > 1:
        raise ConfigError(
            "publish.base_model: names one model, and the study publishes several; use one study per model"
        )
