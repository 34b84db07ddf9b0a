"""What one process of a latency measurement is to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantmill import engines


@dataclass(frozen=True)
class LatencyTask:
    """What one process is to do; paths are text, so that a job is JSON as it stands."""

    task: Literal["measure", "try_threads"]
    out: str
    artifact: str
    engine: str
    options: dict[str, Any]
    gpus: int
    device: str
    threads: list[int]  # one, or those to try
    prompts: str  # what tokens.tokenize_texts wrote
    evaluation: str | None  # the same of the text that longer prompts and batches are cut from
    new_tokens: int
    repeats: int
    prompt_tokens: list[int]
    batch_sizes: list[int]
    number: int = 0  # of the process among those of its way to decode
    mode: str | None = None  # the way to decode; None for the plain one

    def load(self, threads: int) -> engines.Engine:
        """The engine with the artifact."""
        return engines.load(self.engine, Path(self.artifact), self.device, threads, self.gpus, **self.options)
