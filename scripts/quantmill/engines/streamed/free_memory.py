"""The memory that a model may take, on the host or on a GPU."""

from pathlib import Path

import torch

from quantmill.checkpoint import shards
from quantmill.devices import memory

SHARE = 0.9  # of the free memory that a whole model may take


def exceeds(artifact: Path, dtype: torch.dtype, device: str) -> bool:
    """Return whether an artifact's weights in `dtype` do not fit the memory that this process may take."""
    need = dtype.itemsize * sum(tensor.numel for tensor in shards.find(artifact).tensors().values())
    return need > SHARE * available(device)


def available(device: str) -> int:
    """Return the bytes that this process may still take of the host's memory, or of its GPU's."""
    if device == "cpu":
        return memory.available_bytes()
    free, total = torch.cuda.mem_get_info()
    return min(free, int(torch.cuda.get_per_process_memory_fraction() * total) - torch.cuda.memory_reserved())
