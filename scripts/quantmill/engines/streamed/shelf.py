"""Tensors that wait on the disk, in files without names: nothing is left of them, however the process ends."""

import shutil
import tempfile
from collections.abc import Callable

import numpy as np
import torch

from quantmill.common.program import UserError


def check_space(nbytes: int) -> None:
    """Raise `UserError` if the folder of temporary files (TMPDIR) is too small for `nbytes` bytes."""
    folder = tempfile.gettempdir()
    if nbytes > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"{folder}: the activations of all texts take {nbytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; free "
            "some disk, or name another folder in TMPDIR"
        )


def put(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Write a tensor, and return what reads it again, once. Raises `UserError` if the disk is full."""
    dtype, shape, device = tensor.dtype, tensor.shape, tensor.device  # `take` must not keep the tensor
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (`take` closes it)
    bits = tensor.cpu().clone().view(torch.uint8).numpy()  # a tensor that numpy has seen cannot give its memory back
    try:
        bits.tofile(file)
    except OSError as error:
        file.close()
        raise UserError(f"{tempfile.gettempdir()}: no room for the activations of all texts ({error})") from None

    def take() -> torch.Tensor:
        with file:
            file.seek(0)
            found = torch.from_numpy(np.fromfile(file, np.uint8)).view(dtype).reshape(shape)
        return found.to(device)

    return take
