"""A server's model folder, model name, host and port."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """`folder`: the artifact, as the server sees it. `name`: the model's name in requests."""

    folder: str
    name: str
    host: str
    port: int
