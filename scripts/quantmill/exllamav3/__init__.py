"""ExLlamaV3 with its kernels, which exllamav3.compile compiled for this machine's GPUs."""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from quantmill.checkpoint.tensor import Tensor
from quantmill.common import manifest
from quantmill.common.program import UserError

FOLDER = "artifacts/libraries/exllamav3"  # where the workflow puts it; QUANTMILL_EXLLAMAV3 names another place
MODULE = "exllamav3_ext"  # the library's name for the compiled module, and for the folder that torch builds it in
INT8 = "EXL3_INT8_GEMV"  # the library's switch: 2, its default, decodes by int8 products
INT8_OUTPUTS = 256  # these products need multiples of it


def library() -> ModuleType:
    """Import the package. Raises `UserError` if its kernels are not compiled, or for other GPUs: it would compile them
    for an hour, with a lock that stays when it is killed."""
    folder = Path(os.environ.get("QUANTMILL_EXLLAMAV3", FOLDER)).absolute()
    again = f"compile them: python scripts/quantmill exllamav3.compile {folder}"
    if not any(path.exists() for path in folder.glob(f"{MODULE}*.so")) or not (folder / manifest.NAME).exists():
        raise UserError(f"{folder}: has no kernels of ExLlamaV3; {again}")
    import torch  # here, so that the line above needs none

    compiled = json.loads((folder / manifest.NAME).read_text(encoding="utf-8"))["architectures"]
    for number in range(torch.cuda.device_count()):
        here = "{}.{}".format(*torch.cuda.get_device_capability(number))
        if here not in compiled.split(";"):
            raise UserError(
                f"{folder}: its kernels are for compute capability {compiled}, this GPU has {here}; {again}"
            )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("exllamav3")


def decodes_in_int8(stored: Mapping[str, Tensor], most_bits: int) -> bool:
    """Return whether the library rounds some layer's input to int8 when it decodes one or two requests: with the
    codebook mul1, at most `most_bits` bits a weight, and a multiple of `INT8_OUTPUTS` outputs."""
    layers = [name.removesuffix(".trellis") for name in stored if name.endswith(".trellis")]
    shapes = [stored[f"{layer}.trellis"].shape for layer in layers if f"{layer}.mul1" in stored]
    return os.environ.get(INT8, "2") == "2" and any(
        words <= 16 * most_bits and 16 * columns % INT8_OUTPUTS == 0 for _, columns, words in shapes
    )
