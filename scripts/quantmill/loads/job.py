"""What one start of a server is told, and what it gives back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmill.loads.plan import Plan
from quantmill.loads.server_start import Start
from quantmill.tokens.files import Tokens


@dataclass(frozen=True)
class LoadTask:
    """What one process is to do; paths are text, so that a job is JSON as it stands."""

    artifact: str
    engine: str
    options: dict[str, Any]
    gpus: int
    device: str
    threads: int
    loads: dict[str, Any]
    evaluation: str
    burst: str | None
    seed: int
    ceiling: float
    number: int  # of the start

    def plan(self) -> Plan:
        """What is to be sent."""
        texts = Tokens.read(Path(self.burst)).prompts if self.burst else []
        return Plan(self.loads, Tokens.read(Path(self.evaluation)), [prompt.ids for prompt in texts], self.seed)


@dataclass(frozen=True)
class StartResult:
    """What one start gave, and what the server says of itself."""

    start: Start
    peak_memory_bytes: int | None
    compute_type: str
    versions: dict[str, str]
    threads: int | None
