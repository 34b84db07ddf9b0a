"""The protocol of a latency measurement, and the tasks of its processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantmill import engines
from quantmill.devices.fresh_process import Task


@dataclass(frozen=True)
class Protocol:
    """The config's `latency` (config/README.md). Its defaults are those of config/config.schema.yaml."""

    new_tokens: int
    repeats: int
    processes: int
    decode: Literal["generate", "captured"]  # captured: after generate, where the engine can
    prompt_tokens: list[int]
    batch_sizes: list[int]


@dataclass(frozen=True)
class LatencyTask(Task):
    """The task of one process: to measure with a number of threads, or to find the best of several numbers."""

    threads: list[int]
    prompts: Path  # written by tokens.tokenize_texts
    evaluation: Path  # the same, of the text that longer prompts and batches are cut from
    protocol: Protocol
    number: int = 0  # of the process among those of its way to decode
    mode: str | None = None  # the way to decode; None for the plain one

    def load(self, threads: int) -> engines.Engine:
        """Load the artifact with its engine."""
        return engines.load(self.engine, self.artifact, self.device, threads, self.gpus, **self.options)
