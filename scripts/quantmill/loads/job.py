"""The task of one start of a server, and its result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmill.devices.fresh_process import Task
from quantmill.loads.plan import Plan
from quantmill.loads.server_start import Start
from quantmill.tokens.files import Tokens


@dataclass(frozen=True)
class LoadTask(Task):
    """The task of one start of a server: to put it under every load of the study."""

    threads: int
    loads: dict[str, Any]  # the config's `loads`
    evaluation: Path
    burst: Path | None
    seed: int
    ceiling: float
    number: int  # of the start

    def plan(self) -> Plan:
        """Plan the requests."""
        texts = Tokens.read(self.burst).prompts if self.burst else []
        return Plan(self.loads, Tokens.read(self.evaluation), [prompt.ids for prompt in texts], self.seed)


@dataclass(frozen=True)
class StartResult:
    """The loads of one start, and what the server reports about itself."""

    start: Start
    peak_memory_bytes: int | None
    compute_type: str
    versions: dict[str, str]
    threads: int | None
    kv_bytes_per_token: int | None  # of the first start
