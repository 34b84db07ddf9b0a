"""A process of build.llmcompressor_rank on a CPU, for placement_checks.py.

Processes share a model's memory on the host. On a GPU each computes with copies of a layer, and sends the others what
it rounded. On a CPU the layer would be the shared memory itself, which other processes change meanwhile. So it is
copied here, and sent as on a GPU.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import torch
from compressed_tensors.offload.cache.cpu import CPUCache
from llmcompressor.modifiers.gptq import base

from quantmill.build import llmcompressor_rank
from quantmill.common.program import run


def onload(cache: CPUCache, offloaded: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy, as a GPU's is."""
    if offloaded is None:
        return None
    copy = offloaded.detach().clone()
    return torch.nn.Parameter(copy, requires_grad=False) if isinstance(offloaded, torch.nn.Parameter) else copy


CPUCache.onload = onload
base.broadcast_qparams_and_cleanup = partial(base.broadcast_qparams_and_cleanup, skip_cpu=False)
torch.set_num_threads(1)
run(llmcompressor_rank.main)
