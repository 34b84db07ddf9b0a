"""Engines of attached servers, asked about transcripts of real ones."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, interpreter
from transcript import Exchange, Replay

Told = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an artifact what an attached server's engine reads."""
    folder = tmp_path_factory.mktemp("model") / "fp16"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(REPO / "demo" / name, folder)
    return folder


@pytest.fixture
def attach(model_files: Path, call: Callable[..., Told]) -> Callable[..., Told]:
    """Return an engine's report of a server."""

    def run(engine: str, url: str, environment: dict[str, str] | None = None, **options: Any) -> Told:
        command = [interpreter("tools"), REPO / "tests/servers/attached_facts.py", engine, model_files]
        said = json.dumps(options | {"url": url})
        return call(*command, said, PYTHONPATH=str(REPO / "scripts"), **(environment or {}))

    return run


def read(name: str) -> dict[str, Any]:
    return json.loads((REPO / f"tests/servers/transcripts/{name}.json").read_text(encoding="utf-8"))


class Changed(Replay):
    """A transcript whose answers are changed: `change(exchange)` gives another one. Its health may be asked again."""

    def __init__(self, exchanges: list[Exchange], change: Callable[[Exchange], Exchange]) -> None:
        super().__init__([change(each) for each in exchanges])
        self.health = exchanges[0]

    def __call__(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Exchange:
        asked_again = path == self.health["path"] and self.left[0]["path"] != path
        return self.health if asked_again else super().__call__(method, path, body, headers)


def posts(change: Callable[[str], str]) -> Callable[[Exchange], Exchange]:
    """Change each chunk of what follows a prompt."""
    return lambda each: each | {"chunks": list(map(change, each["chunks"]))} if each["method"] == "POST" else each
