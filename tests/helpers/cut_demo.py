"""The demo with few layers, as an fp16 artifact with random ids to calibrate on: for tests that run quantizers."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO

from quantmill.checkpoint import safetensors_file, sharding, shards
from quantmill.common import manifest


@pytest.fixture(scope="module")
def demo_safetensors(tmp_path_factory: pytest.TempPathFactory, tools_python: Path) -> Path:
    """Return the demo's canonical safetensors."""
    folder = tmp_path_factory.mktemp("model") / "safetensors"
    command = [tools_python, REPO / "scripts/quantmill", "checkpoint.to_safetensors", REPO / "demo", folder]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory, demo_safetensors: Path, tools_python: Path) -> Path:
    """Return a folder with the demo's first layer as `fp16`, and `calibration.json` and `evaluation.json`."""
    return cut(tmp_path_factory.mktemp("one-layer"), 1, demo_safetensors, tools_python)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory, demo_safetensors: Path, tools_python: Path) -> Path:
    """Return the same with its first two layers."""
    return cut(tmp_path_factory.mktemp("two-layers"), 2, demo_safetensors, tools_python)


def cut(folder: Path, layers: int, model: Path, tools_python: Path) -> Path:
    """Write the first layers of a model as an fp16 artifact."""
    source = shards.find(model)
    kept = [
        tensor
        for name, tensor in source.tensors().items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < layers
    ]
    (folder / "cut").mkdir()
    for path in source.others():
        shutil.copyfile(path, folder / "cut" / path.name)
    (folder / "cut/config.json").write_text(json.dumps(source.config() | {"num_hidden_layers": layers}))
    sharding.write(folder / "cut", "safetensors", [kept], safetensors_file.write)
    about = {"format": "safetensors", "tool": "test", "tool_version": "1"}
    manifest.write(folder / "cut", **about, source={}, parameter_count=1)
    command = [tools_python, REPO / "scripts/quantmill", "build.fp16", folder / "cut", folder / "fp16"]
    subprocess.run(list(map(str, command)), check=True)
    random = np.random.default_rng(0)
    for name in ("calibration", "evaluation"):
        ids = random.integers(10, 2000, 2000).tolist()
        (folder / f"{name}.json").write_text(json.dumps({"ids": ids, "context": 512, "text_sha256": name}))
    return folder
