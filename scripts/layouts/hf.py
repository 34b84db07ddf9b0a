"""Plain tensors under the source's names, as transformers stores them."""

from pathlib import Path

import numpy as np

from checkpoint import shards
from checkpoint.shards import Checkpoint
from checkpoint.tensor import Tensor
from layouts import Reading, Unread, array


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`."""
    stored = shards.find(artifact).tensors()

    def weights(tensor: Tensor) -> np.ndarray:
        if tensor.name not in stored:
            raise Unread(f"it holds no {tensor.name}")
        return array(stored[tensor.name])

    return weights
