"""Plain tensors under the source's names, as transformers stores them."""

from pathlib import Path

from checkpoint import shards
from checkpoint.shards import Checkpoint
from layouts import Reading, find


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`."""
    stored = shards.find(artifact).tensors()
    return lambda tensor: find(stored, tensor.name)
