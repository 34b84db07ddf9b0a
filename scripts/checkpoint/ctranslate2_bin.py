"""What lies in a CTranslate2 model.bin: the names, dtypes and sizes of its variables.

The layout is that of ctranslate2/specs/model_spec.py, ModelSpec._serialize, binary version 6: a version, the model's
name and revision, then the variables (name, rank, dimensions, dtype, bytes, data) and the aliases.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.plain_file import open_plain
from common.program import UserError

VERSION = 6
DTYPES = {0: "float32", 1: "int8", 2: "int16", 3: "int32", 4: "float16", 5: "bfloat16"}
BYTES = {"float32": 4, "int8": 1, "int16": 2, "int32": 4, "float16": 2, "bfloat16": 2}
MAX_VARIABLES = 200_000  # of a model; the largest have some 10,000
EMBEDDINGS = "decoder/embeddings/"
HEAD = "decoder/projection/weight"


@dataclass(frozen=True)
class Variable:
    """One stored array: its dtype's name, its shape, and the byte in the file where its `nbytes` begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read(path: Path) -> dict[str, Variable]:
    """Name -> `Variable`. Raises `UserError` where the file has another version, is cut off, contradicts itself, or
    tells of more variables than a model has."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            (version,) = _unpack(file, "<I")
            if version != VERSION:
                raise UserError(
                    f"{path}: binary version {version} where {VERSION} is known; rebuild it with ctranslate2 4"
                )
            _string(file)
            _, count = _unpack(file, "<II")
            if count > MAX_VARIABLES:  # a header of each is 20 bytes, and takes 300 here
                raise UserError(f"{path}: tells of {count} variables, which no model has; refused")
            variables = {}
            for _ in range(count):
                name = _string(file)
                (rank,) = _unpack(file, "<B")
                shape = _unpack(file, f"<{rank}I")
                dtype, nbytes = _unpack(file, "<BI")
                found = Variable(DTYPES.get(dtype, f"dtype {dtype}"), shape, file.tell(), nbytes)
                if nbytes != found.numel * BYTES.get(found.dtype, 0):
                    raise UserError(
                        f"{path}: {name!r:.80} has {nbytes} bytes for {list(shape)} of {found.dtype}; build it again"
                    )
                variables[name] = found
                if file.seek(nbytes, 1) > size:
                    raise EOFError
            return variables
    except (EOFError, struct.error, UnicodeDecodeError):
        raise UserError(f"{path}: cut off, or no CTranslate2 model; build it again") from None


def bytes_per_token(variables: dict[str, Variable], compute_type: str | None = None) -> int:
    """Bytes of weights that one decoded token reads: all but the embedding table, unless it is the output head too.

    Args:
        compute_type: CTranslate2's name of what it multiplies in, to which it turns weights while it loads them; None:
            as they are stored.
    """
    tied = HEAD not in variables
    return sum(
        _loaded_bytes(name, variable, compute_type) if compute_type else variable.nbytes
        for name, variable in variables.items()
        if tied or not name.startswith(EMBEDDINGS)
    )


def _loaded_bytes(name: str, variable: Variable, compute_type: str) -> int:
    """Bytes of a variable once loaded: matrices have the integer's width where the type has one."""
    integer, _, floating = compute_type.rpartition("_")
    if compute_type in ("int8", "int16"):
        integer, floating = compute_type, "float32"
    if variable.dtype in ("int8", "int16") or (name.endswith("/weight") and len(variable.shape) == 2):
        return variable.numel * BYTES[integer or floating]
    return variable.numel * BYTES[floating] if "float" in variable.dtype else variable.nbytes


def _unpack(file: BinaryIO, layout: str) -> tuple:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<H")
    return file.read(length)[:-1].decode("utf-8")
