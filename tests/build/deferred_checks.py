"""Run in envs/torch: call functions of torch with a deferred tensor and with the tensor, and print whether they return
the same, as JSON.

    python tests/build/deferred_checks.py FOLDER
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import numpy as np
import safetensors.torch
import torch

from quantmill.build import deferred
from quantmill.checkpoint import safetensors_file


def assigned(tensor: torch.Tensor) -> torch.Tensor:
    """Turn some columns, as GPT-J's loader does."""
    view = tensor.reshape(8, 8, -1)
    view[:, :4] = view[:, :4].flip(1)
    return view.reshape(tensor.shape)


def assigned_to_another(tensor: torch.Tensor) -> torch.Tensor:
    another = torch.zeros(128, 64, dtype=tensor.dtype)
    another[:64] = tensor
    return another


def added_to(tensor: torch.Tensor) -> None:
    tensor += 1


def with_other_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.float()


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "a transposed view": lambda tensor: tensor.T,
    "rows": lambda tensor: tensor[3:],
    "a permutation": lambda tensor: tensor[torch.arange(63, -1, -1), :],
    "the second half": lambda tensor: tensor.chunk(2, dim=0)[1],
    "joined rows": lambda tensor: torch.cat([tensor, torch.zeros(2, 64, dtype=tensor.dtype), tensor.float().half()]),
    "joined stored rows": lambda tensor: torch.cat([tensor, tensor]),
    "joined rows of two dtypes": lambda tensor: torch.cat([tensor, tensor.float()]),
    "joined columns": lambda tensor: torch.cat([tensor, tensor], dim=1),
    "another dtype": lambda tensor: tensor.to("cpu", torch.float32) + 1.0,
    "ones": lambda tensor: torch.ones_like(tensor).float().numpy(),
    "a number": lambda tensor: tensor.sum().item(),
    "where it is not 0": lambda tensor: tensor.nonzero(),
    "a truth": lambda tensor: bool((tensor < 9).all()),
    "an equal one": lambda tensor: torch.equal(tensor, tensor.clone()),
    "an unequal one": lambda tensor: torch.equal(tensor, tensor + 1),
    "assigned columns": assigned,
    "assigned to another": assigned_to_another,
    "its size": lambda tensor: (tensor.shape, tensor.dtype, tensor.device, tensor.is_meta, len(tensor), tensor.numel()),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor).data.contiguous(),
}
REFUSED_FUNCTIONS = {
    "in place": lambda tensor: tensor.mul_(2),
    "in place by an operator": added_to,
    "into another": lambda tensor: torch.add(tensor, 1, out=torch.empty(64, 64)),
    "other data": with_other_data,
    "a pointer": lambda tensor: tensor.data_ptr(),
}


def same(function: Callable[[torch.Tensor], Any]) -> bool:
    """Tell whether a function returns the same for a deferred tensor as for the tensor."""
    mine, theirs = function(deferred.of(stored)), function(real.clone())
    if isinstance(mine, torch.Tensor):
        mine = torch.cat([block.clone() for block in deferred.blocks(mine)])
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return bool(np.all(mine == theirs))


def has_stored_bytes(function: Callable[[torch.Tensor], Any]) -> bool | None:
    """Tell whether the stored parts of what a function returns have its bytes; None if it has no stored parts."""
    mine, theirs = function(deferred.of(stored)), function(real.clone())
    if not isinstance(mine, torch.Tensor) or not (parts := deferred.find_stored(mine)):
        return None
    found = b"".join(bytes(chunk) for part in parts for chunk in part.chunks())
    return found == theirs.detach().contiguous().view(torch.uint8).numpy().tobytes()


def refusal(function: Callable[[torch.Tensor], Any]) -> str | None:
    """Return what a function says for a deferred tensor; None if there is no error."""
    try:
        function(deferred.of(stored))
    except NotImplementedError as error:
        return str(error)
    return None


file = Path(sys.argv[1]) / "model.safetensors"
real = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).half()
safetensors.torch.save_file({"weight": real}, file)
stored = safetensors_file.read(file)["weight"]
facts = {
    "same": {what: same(function) for what, function in FUNCTIONS.items()},
    "stored": {what: found for what, each in FUNCTIONS.items() if (found := has_stored_bytes(each)) is not None},
    "refused": {what: refusal(function) for what, function in REFUSED_FUNCTIONS.items()},
}
print(json.dumps(facts))
