"""A deployment as text: a command line, `docker run`, a compose file."""

import csv
import io
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

PORT = 8000
HOST = "0.0.0.0"  # every address: docker decides who may reach a container's port
MODEL = "/model"  # the artifact's folder in a container


@dataclass(frozen=True)
class Deployment:
    """A server in a container.

    entrypoint: the program in the image; None for the image's own. words: its arguments.
    folders: on this machine -> in the container, all read-only. gpus: 0 for a CPU.
    """

    image: str
    entrypoint: str | None
    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0

    @property
    def shares_memory(self) -> bool:
        """Several processes share tensors, for which a container's 64 MB are too few."""
        return self.gpus > 1


def command_line(program: str, words: Iterable[str], environment: Mapping[str, str]) -> str:
    """Return a shell command."""
    setting = ["env", *_assignments(environment)] if environment else []
    return shlex.join([*setting, program, *words])


def docker(found: Deployment) -> str:
    """Return a shell command that starts a container."""
    argv = ["docker", "run", "--rm", "--publish", f"{PORT}:{PORT}"]
    argv += ["--gpus", str(found.gpus)] if found.gpus else []
    argv += ["--ipc", "host"] if found.shares_memory else []
    argv += [word for each in _assignments(found.environment) for word in ("--env", each)]
    argv += [word for each in found.folders.items() for word in ("--mount", _mount(*each))]
    argv += ["--entrypoint", found.entrypoint] if found.entrypoint else []
    return shlex.join([*argv, found.image, *found.words])


def compose(found: Deployment) -> str:
    """Return a compose file with one service."""
    devices = [{"driver": "nvidia", "count": found.gpus, "capabilities": ["gpu"]}]
    volumes = [
        {"type": "bind", "source": each, "target": found.folders[each], "read_only": True} for each in found.folders
    ]
    service = {
        "image": found.image,
        "entrypoint": found.entrypoint and [found.entrypoint],
        "command": found.words,
        "environment": dict(found.environment),
        "ports": [f"{PORT}:{PORT}"],
        "volumes": volumes,
        "ipc": "host" if found.shares_memory else None,
        "deploy": {"resources": {"reservations": {"devices": devices}}} if found.gpus else None,
    }
    whole = {"services": {"model": _literal({key: value for key, value in service.items() if value})}}
    return yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=2**20)


def _assignments(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def _mount(source: str, target: str) -> str:
    """Return a value of --mount, which is a line of CSV."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["type=bind", f"source={source}", f"target={target}", "readonly"])
    return line.getvalue()


def _literal(value: Any) -> Any:
    """Escape `$`, with which a variable begins in compose files."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _literal(each) for key, each in value.items()}
    return [_literal(each) for each in value] if isinstance(value, list) else value
