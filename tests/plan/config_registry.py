"""A small registry of formats and engines, and a folder with what studies name: for tests of the config."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO

from quantmill.plan.config import complete
from quantmill.plan.registry import LAYOUTS, Engine, Format, Registry

SCHEMA = yaml.safe_load((REPO / "config/config.schema.yaml").read_text())
FORMATS = {
    "fp16": Format("hf", "transformers", "torch", "build.fp16"),
    "ct2-int8": Format("ct2", "ctranslate2", "torch", "build.fp16"),
    "gptq-int4": Format("gptq", "gptqmodel", "torch", "build.fp16", config="gptq"),
    "awq-int4": Format("awq", "gptqmodel", "torch", "build.fp16"),
    "gguf-f16": Format("gguf", "llama", "torch", "build.fp16"),
    "only-gpu": Format("hf", "transformers", "torch", "build.fp16", devices=("cuda",)),
}
ENGINES = {
    "transformers": Engine("torch", ("hf",), options={"dtype": {"type": "string"}}),
    "ctranslate2": Engine("torch", ("ct2",)),
    "gptqmodel": Engine("torch", ("gptq", "awq")),
    "quick": Engine("torch", ("gptq",)),
    "llama": Engine("torch", ("gguf",)),
    "old": Engine("old", ("hf", "gptq"), python="2.7"),
    "many": Engine("torch", ("hf",), devices=("cuda",), multi_gpu=True, options=None),
    "external": Engine("mlc_llm", ("hf",)),
    "theirs": Engine("tools", ("hf",), attached=True),
    "slots": Engine("torch", ("hf",), options=None, serves=True, slots="parallel"),
}
REGISTRY = Registry(FORMATS, ENGINES, LAYOUTS, ["torch", "tools", "old"])


def check(**changes: Any) -> dict[str, Any]:
    config = {"models": {"demo": {"source": "demo"}}, "formats": ["fp16", "ct2-int8"]} | changes
    return complete(config, SCHEMA, REGISTRY)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder like the repository's root, with a few models that lack something."""
    shutil.copytree(REPO / "config", tmp_path / "config")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    (tmp_path / "demo" / "pytorch_model.bin").write_text("")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "config.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_text("")
    for pipe in ("pipe", "piped/config.json", "piped-weights/model.safetensors"):
        (tmp_path / pipe).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / pipe, 0o755)
    (tmp_path / "piped-weights" / "config.json").write_text("{}")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin1.txt").write_bytes("déjà vu".encode("latin-1"))
    monkeypatch.chdir(tmp_path)


PREBUILT = {"layout": "gptq", "path": "bare"}


def demo(**prebuilt: Any) -> dict[str, Any]:
    return {"demo": {"source": "demo", "prebuilt": prebuilt}}


def run(**words: Any) -> dict[str, Any]:
    return {"runs": {"x": {"engine": "transformers", "formats": ["fp16"]} | words}}
