"""Study that is ready to publish: artifacts with the recorded demo's figures and random weights."""

import copy
import hashlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from hub_server import Hub, serve
from program_fixtures import Program, Result

from quantmill.plan import registry

TOKEN = "hf_tokenoftheuserwhopublishes"
WEIGHTS = {"ct2-int8": "model.bin", "gptq-int4": "model.safetensors", "fp16": "model.safetensors"}
LAYOUTS = {"ct2-int8": "ct2", "gptq-int4": "gptq", "fp16": "hf"}
HEAD = "---\nlicense: apache-2.0\n---\n# A model\n"
PARSE = """
import json, sys
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
data = ModelCard(sys.stdin.read(), ignore_metadata_errors=False).data
name, results = model_index_to_eval_results(data.to_dict()["model-index"])
head = {key: value for key, value in data.to_dict().items() if key != "model-index"}
print(json.dumps({"head": head, "name": name, "results": [vars(each) for each in results]}))
"""

# a picture that is its data's hash: a real one takes seconds
WITHOUT_DRAWING = """
from hashlib import sha256
from types import SimpleNamespace
from quantmill.report import drawing
drawing.draw = lambda *data: SimpleNamespace(png=b"\\x89PNG" + sha256(repr(data).encode()).digest())
"""


class Study:
    """Artifacts of one model in `root`, and the program that publishes them to a hub on this machine.

    Unless `draws` is set, the picture is a hash of its data.
    """

    def __init__(self, root: Path, hub: Hub, python: Path, run_program: Program) -> None:
        self.root, self.hub, self.python, self.run, self.draws = root, hub, python, run_program, False
        self.results = json.loads((REPO / "results/demo/results.json").read_text())
        (root / "artifacts/report").mkdir(parents=True)
        self.source = root / "artifacts/demo/source"
        self.source.mkdir(parents=True)
        (self.source / "README.md").write_text(HEAD)
        for name, weights in WEIGHTS.items():
            self.build(name, {weights: 3_000_000})
        self.write()

    def row(self, format: str) -> dict[str, Any]:
        """Return the recorded row of a format's default run."""
        return next(row for row in self.results["rows"] if row["format"] == format and row["run"] is None)

    def build(self, name: str, sizes: dict[str, int], like: str = "", **changes: Any) -> Path:
        """Write an artifact: files of n random bytes, a config.json, and the manifest of a recorded row."""
        folder = self.root / "artifacts/demo" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}\n')
        for file, size in sizes.items():
            (folder / file).write_bytes(random.Random(f"{name}{file}").randbytes(size))
        recorded = self.row(like or name)["artifact"] | {"format": name} | changes
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in sorted(folder.iterdir())
            if path.name != "quantmill.json"
        }
        (folder / "quantmill.json").write_text(json.dumps(recorded | {"files": files}))
        return folder

    def add_row(self, like: str, **changes: Any) -> dict[str, Any]:
        """Add a row, a copy of a recorded one with changes."""
        self.results["rows"].append(copy.deepcopy(self.row(like)) | changes)
        return self.results["rows"][-1]

    def write(self) -> None:
        """Write results.json."""
        (self.root / "artifacts/report/results.json").write_text(json.dumps(self.results))

    def command(self, *names: str, repository: str = "acme/demo", layout: str = "") -> list[str]:
        """Return our program that publishes artifacts, with its arguments."""
        folders = [f"artifacts/demo/{name}" for name in names]
        layout = layout or LAYOUTS[names[0]]
        command = ["publish.push", "artifacts/demo/published/x.json", *folders, "--repository", repository]
        command += ["--model", "demo", "--layout", layout, "--library", registry.LAYOUTS[layout].hub_library]
        return [*command, "--results", "artifacts/report/results.json"]

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a user with a token and an empty cache; uploads go over LFS."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        mine = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.root / "home"), "HF_TOKEN": TOKEN}
        return kept | mine | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "5"} | more

    def push(self, *names: str, more: tuple[str, ...] = ("--source", "artifacts/demo/source"), **words: Any) -> Result:
        """Publish artifacts."""
        command = self.command(*names, **{key: words.pop(key) for key in ("repository", "layout") if key in words})
        before = "" if self.draws else WITHOUT_DRAWING
        return self.run(*command, *more, before=before, folder=self.root, environment=self.environment(**words))

    def receipt(self) -> dict[str, Any] | None:
        """Return the local record of the last upload."""
        path = self.root / "artifacts/demo/published/x.json"
        return json.loads(path.read_text()) if path.exists() else None

    def published(self, *names: str, **words: Any) -> dict[str, bytes]:
        """Publish artifacts, and return the files of the repository."""
        result = self.push(*names, **words)
        assert result.returncode == 0, result.stderr
        return self.hub.repositories["models/acme/demo"].files

    def head(self, card: bytes) -> dict[str, Any]:
        """Return the head of a card, by the hub's own parsers."""
        found = subprocess.run([self.python, "-c", PARSE], input=card, capture_output=True, check=True)
        return json.loads(found.stdout)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as server:
        server.storage.writers, server.storage.part = {TOKEN}, 1_000_000
        yield server


@pytest.fixture
def study(tmp_path: Path, hub: Hub, tools_python: Path, run_program: Program) -> Study:
    return Study(tmp_path / "alicesecret", hub, tools_python, run_program)
