"""Where a server finds what it serves, and where it is found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """`folder`: the artifact's, as the server sees it. `name`: what requests call the model."""

    folder: str
    name: str
    host: str
    port: int
