"""Plain tensors under the source's names, as transformers stores them."""

from pathlib import Path

from quantmill.checkpoint.shards import Checkpoint
from quantmill.layouts import Reading, find, stored_tensors


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`."""
    stored = stored_tensors(artifact, source)
    return lambda tensor: find(stored, tensor.name)
