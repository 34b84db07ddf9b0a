"""A study before it is published: artifacts with the recorded demo's figures and made-up weights."""

import copy
import hashlib
import json
import os
import random
import resource
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from conftest import REPO
from hub_server import Hub

from quantmill.plan import registry

TOKEN = "hf_tokenoftheuserwhopublishes"
WEIGHTS = {"ct2-int8": "model.bin", "gptq-int4": "model.safetensors", "fp16": "model.safetensors"}
LAYOUTS = {"ct2-int8": "ct2", "gptq-int4": "gptq", "fp16": "hf"}
ADDRESSES = 16 * 2**30  # bytes that a program may reserve; drawing, which reserves 68 GB, then gives up at once
HEAD = "---\nlicense: apache-2.0\n---\n# A model\n"


class Study:
    """Artifacts of one model in `root`, and the program that publishes them to a hub on this machine.

    Where `draws` is false, the picture is a text that says why there is none: drawing takes half of the time.
    """

    draws = False

    def __init__(self, root: Path, hub: Hub, python: Path) -> None:
        self.root, self.hub, self.python = root, hub, python
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
        """Write an artifact with random files of the given sizes, a config.json, and a recorded row's manifest."""
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
        """One more row, like a recorded one."""
        self.results["rows"].append(copy.deepcopy(self.row(like)) | changes)
        return self.results["rows"][-1]

    def write(self) -> None:
        """Write results.json."""
        (self.root / "artifacts/report/results.json").write_text(json.dumps(self.results))

    def command(self, *names: str, repository: str = "acme/demo", layout: str = "") -> list[str]:
        """Return the command that publishes artifacts."""
        folders = [f"artifacts/demo/{name}" for name in names]
        command = [self.python, REPO / "scripts/quantmill", "publish.push", "artifacts/demo/published/x.json", *folders]
        layout = layout or LAYOUTS[names[0]]
        command += ["--repository", repository, "--model", "demo", "--layout", layout]
        command += ["--library", registry.LAYOUTS[layout].hub_library]
        command += ["--results", "artifacts/report/results.json"]
        return [*map(str, command)]

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a user with a token and an own cache; uploads use LFS, like the test's hub."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        mine = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.root / "home"), "HF_TOKEN": TOKEN}
        return kept | mine | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "5"} | more

    def push(
        self, *names: str, more: tuple[str, ...] = ("--source", "artifacts/demo/source"), **words: Any
    ) -> subprocess.CompletedProcess[str]:
        """Publish artifacts."""
        command = self.command(*names, **{key: words.pop(key) for key in ("repository", "layout") if key in words})
        limit = partial(resource.setrlimit, resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        options = {"cwd": self.root, "env": self.environment(**words), "preexec_fn": None if self.draws else limit}
        return subprocess.run([*command, *more], **options, capture_output=True, text=True, timeout=120)

    def receipt(self) -> dict[str, Any] | None:
        """Return the record of the last upload."""
        path = self.root / "artifacts/demo/published/x.json"
        return json.loads(path.read_text()) if path.exists() else None
