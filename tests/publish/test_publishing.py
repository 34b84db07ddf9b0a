"""Run `snakemake publish`, and use what was published in another study."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from conftest import REPO, interpreter
from hub_server import Hub, serve

from quantmill.common import manifest

TOKEN = "hf_tokenoftheuserwhopublishes"
SNAKEMAKE = REPO / ".venv/bin/snakemake"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve() as server:
        server.storage.writers = {TOKEN}
        yield server


@pytest.fixture(scope="module")
def root(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the demo's run whose study publishes two of its artifacts."""
    copied = shutil.copytree(demo, tmp_path_factory.mktemp("publishing") / "demo", symlinks=True)
    words = {"repository": "acme/{model}-{format}", "formats": ["fp16", "ct2-int8"], "license": "apache-2.0"}
    with (copied / "config/config.yaml").open("a") as config:
        config.write(f"publish: {json.dumps(words)}\n")
    return copied


@pytest.fixture(scope="module")
def snakemake(hub: Hub, root: Path) -> Callable[..., str]:
    """Return a function that runs Snakemake with a token and returns its output."""

    def run(*options: str, good: bool = True) -> str:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        mine = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(root.parent / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [str(SNAKEMAKE), "--cores", "8", *options]
        result = subprocess.run(
            command, cwd=root, env=kept | mine | {"HF_TOKEN": TOKEN}, capture_output=True, text=True
        )
        assert (result.returncode == 0) is good, result.stdout + result.stderr
        return result.stdout + result.stderr

    return run


def test_only_the_target_publish_uploads(hub: Hub, root: Path, snakemake: Callable[..., str]) -> None:
    snakemake("report")
    assert not hub.log
    snakemake("publish")
    assert hub.repositories.keys() == {"models/acme/demo-fp16", "models/acme/demo-ct2-int8"}
    for name in ("fp16", "ct2-int8"):
        receipt = json.loads((root / f"artifacts/demo/published/{name}.json").read_text())
        assert receipt["commit"] == hub.repositories[f"models/{receipt['repository']}"].commit
        weights = json.loads((root / f"artifacts/demo/{name}/quantmill.json").read_text())["files"]
        assert {file for file in weights if file.endswith((".safetensors", ".bin"))} <= receipt["files"].keys()
    before = len(hub.log)
    assert "Nothing to be done" in snakemake("publish")
    assert len(hub.log) == before
    (root / "artifacts/demo/published/fp16.json").unlink()
    snakemake("publish")
    assert {method for method, *_ in hub.log[before:]} <= {"GET", "HEAD"}  # it is there already
    places = [root / "artifacts", root / ".snakemake"]
    written = subprocess.run(["grep", "-rlF", TOKEN, *places], capture_output=True, text=True, check=False)
    assert written.stdout == ""


def test_a_published_artifact_is_measured_as_prebuilt(hub: Hub, root: Path, snakemake: Callable[..., str]) -> None:
    snakemake("publish")
    config = yaml.safe_load((root / "config/config.yaml").read_text())
    theirs = {"layout": "ct2", "hub": "acme/demo-ct2-int8"}
    kept = {name: config[name] for name in ("texts", "calibration", "latency", "interpreters")}
    study = kept | {"models": {"again": {"source": "demo", "formats": ["fp16"], "prebuilt": {"theirs": theirs}}}}
    (root / "again.yaml").write_text(json.dumps(study))
    snakemake("artifacts/again/theirs", "--configfile", "again.yaml")
    found = json.loads((root / "artifacts/again/theirs/quantmill.json").read_text())
    assert (found["prebuilt"], found["source"]["hub"]) == (True, "acme/demo-ct2-int8")
    weights = (root / "artifacts/again/theirs/model.bin").read_bytes()
    assert weights == (root / "artifacts/demo/ct2-int8/model.bin").read_bytes()


def test_the_published_study_builds_the_same_files(hub: Hub, root: Path, snakemake: Callable[..., str]) -> None:
    snakemake("publish")
    files = hub.repositories["models/acme/demo-ct2-int8"].files
    study = yaml.safe_load(files["study.yaml"]) | {"interpreters": interpreters(root)}
    study["models"] = {"rebuilt": study["models"]["demo"]}
    (root / "rebuilt.yaml").write_text(json.dumps(study))
    shutil.copy(root / "short.txt", root / "evaluation.txt")  # the study's own text, which is not published
    snakemake("artifacts/rebuilt/ct2-int8", "--configfile", "rebuilt.yaml")
    recorded = json.loads(files["quantmill.json"])["files"]
    for name in ("model.bin", "vocabulary.json", "tokenizer.json"):
        assert manifest.sha256(root / "artifacts/rebuilt/ct2-int8" / name) == recorded[name]["sha256"]


def interpreters(root: Path) -> dict[str, str]:
    """Return the environments that the copy's study names."""
    return yaml.safe_load((root / "config/config.yaml").read_text())["interpreters"]


@pytest.mark.parametrize("name", ["fp16", "ct2-int8"])
def test_the_cards_own_lines_run_it(hub: Hub, root: Path, snakemake: Callable[..., str], name: str) -> None:
    snakemake("publish")
    card = hub.repositories[f"models/acme/demo-{name}"].files["README.md"].decode()
    lines = card.partition("```python\n")[2].partition("```")[0]
    home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(root.parent / "reader"), "HF_TOKEN": TOKEN}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    command = [str(interpreter("torch")), "-c", lines]
    result = subprocess.run(command, env=kept | home, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 10
