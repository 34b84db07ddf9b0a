"""Repositories of a study, and mistakes in `publish:`, which end in one line at parse time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO

from quantmill.plan import publications
from quantmill.plan.config import complete
from quantmill.plan.config_values import ConfigError
from quantmill.plan.registry import LAYOUTS, Engine, Format, Registry

SCHEMA = yaml.safe_load((REPO / "config/config.schema.yaml").read_text())
FORMATS = {
    "fp16": Format("hf", "transformers", "torch", "build.fp16"),
    "gptq-int4": Format("gptq", "gptqmodel", "torch", "build.fp16", config="gptq"),
    "gguf-f16": Format("gguf", "llama", "torch", "build.fp16"),
    "gguf-q4_k_m": Format("gguf", "llama", "torch", "build.fp16"),
}
ENGINES = {
    "transformers": Engine("torch", ("hf",)),
    "gptqmodel": Engine("torch", ("gptq",)),
    "llama": Engine("torch", ("gguf",)),
}
REGISTRY = Registry(FORMATS, ENGINES, LAYOUTS, ["torch"])
PUBLISH = {"repository": "acme/{model}-{format}", "formats": ["gptq-int4"]}


def study(**changes: Any) -> dict[str, Any]:
    """Return a study's config with its defaults."""
    config = {"models": {"demo": {"source": "demo"}}, "formats": [*FORMATS], "publish": PUBLISH} | changes
    return complete(config, SCHEMA, REGISTRY)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


def test_nothing_is_published_by_default() -> None:
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16"]}
    assert publications.of_study(complete(config, SCHEMA, REGISTRY), REGISTRY) == []


def test_a_repository_an_artifact_is_private_by_default() -> None:
    found = study(
        variants={"gptq-g32": {"format": "gptq-int4", "group_size": 32}}, publish=PUBLISH | {"formats": ["gptq-g32"]}
    )
    assert found["publish"]["private"] is True
    assert found["publish"]["overwrite"] is False
    (only,) = publications.of_study(found, REGISTRY)
    assert (only.repository, only.model, only.artifacts) == ("acme/demo-gptq-g32", "demo", ("gptq-g32",))


def test_gguf_files_of_a_model_share_a_repository() -> None:
    words = PUBLISH | {"formats": ["gguf-q4_k_m", "fp16", "gguf-f16"]}
    models = {"a": {"source": "demo"}, "b": {"source": "demo", "formats": ["fp16", "gguf-f16"]}}
    found = [
        (each.repository, each.artifacts)
        for each in publications.of_study(study(models=models, publish=words), REGISTRY)
    ]
    assert found == [
        ("acme/a-fp16", ("fp16",)),
        ("acme/a-GGUF", ("gguf-f16", "gguf-q4_k_m")),
        ("acme/b-fp16", ("fp16",)),
        ("acme/b-GGUF", ("gguf-f16",)),
    ]


TWO = {"a": {"source": "demo"}, "b": {"source": "demo"}}


@pytest.mark.parametrize(
    ("changes", "publish", "reason"),
    [
        ({}, {"formats": ["gptq-int5"]}, "publish.formats: unknown format 'gptq-int5'; did you mean 'gptq-int4'?"),
        ({"formats": ["fp16"]}, {}, "publish.formats: no model has gptq-int4; add it to formats"),
        ({}, {"repository": "acme"}, "publish.repository: a repository is ORGANISATION/NAME"),
        ({}, {"repository": "acme/{modell}"}, "publish.repository: a repository is ORGANISATION/NAME"),
        ({}, {"repository": "acme/a;rm"}, "publish.repository: a repository is ORGANISATION/NAME"),
        ({}, {"repository": "acme/" + "a" * 90 + "{format}"}, "has over 96 letters; shorten it"),
        (
            {},
            {"repository": "acme/x", "formats": ["fp16", "gptq-int4"]},
            "would share acme/x; write {model} and {format}",
        ),
        (
            {"models": TWO},
            {"repository": "acme/{format}"},
            "a's gptq-int4 and b's gptq-int4 would share acme/gptq-int4",
        ),
        ({"models": TWO}, {"base_model": "acme/base"}, "publish.base_model: names one model"),
        ({}, {"license": "Apache 2"}, "publish.license: a licence is one of the hub's words"),
        ({}, {"token": "hf_x"}, "publish: unknown key 'token'"),
        ({}, {"private": "yes"}, "publish.private: 'yes' is not of type 'boolean'"),
        ({}, {"formats": []}, "publish.formats: [] should be non-empty"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], publish: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        study(**changes, publish=PUBLISH | publish)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prebuilt_artifacts_and_random_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    theirs = {"theirs": {"layout": "gptq", "path": str(tmp_path)}}
    models = {"demo": {"source": "demo", "prebuilt": theirs}}
    with pytest.raises(ConfigError, match="theirs is prebuilt"):
        study(models=models, publish=PUBLISH | {"formats": ["theirs"]})
    random = {"shape": {"source": {"random": str(tmp_path / "config.json")}}}
    with pytest.raises(ConfigError, match="shape has random weights"):
        study(models=random)


def test_an_artifact_cannot_have_the_receipts_name() -> None:
    variants = {"published": {"format": "gptq-int4", "group_size": 32}}
    with pytest.raises(ConfigError, match="choose another"):
        complete(
            {"models": {"demo": {"source": "demo"}}, "variants": variants}, SCHEMA, replace(REGISTRY, device="cpu")
        )
