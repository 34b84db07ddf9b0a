"""ExLlamaV3 with its kernels, which compile_exllamav3.py compiled for this machine's GPUs."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from common import manifest
from common.program import UserError

FOLDER = "artifacts/libraries/exllamav3"  # where the workflow puts it; QUANTMILL_EXLLAMAV3 names another place
INT8 = "EXL3_INT8_GEMV"  # the library's own switch: what one position is rounded to when it decodes; 0 for nothing
INT8_DEFAULT = "2"


def library() -> ModuleType:
    """The package. Raises `UserError` where its kernels are not compiled: it would compile them itself, for an hour,
    with a lock that stays when it is killed."""
    folder = Path(os.environ.get("QUANTMILL_EXLLAMAV3", FOLDER)).absolute()
    if not (folder / manifest.NAME).exists():
        raise UserError(
            f"{folder}: holds no kernels of ExLlamaV3; compile them: python scripts/compile_exllamav3.py {folder}"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("exllamav3")
