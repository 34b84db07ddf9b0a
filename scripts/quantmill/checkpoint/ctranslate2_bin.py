"""The contents of a CTranslate2 model.bin: names, dtypes and sizes of its variables, and their aliases.

The format is that of ctranslate2/specs/model_spec.py, ModelSpec._serialize, binary version 6: a version, the model's
name and revision, then the variables (name, rank, dimensions, dtype, bytes, data) and the aliases.
"""

import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from quantmill.checkpoint.copying import write_all
from quantmill.common.plain_file import open_plain
from quantmill.common.program import UserError

VERSION = 6
DTYPES = {0: "float32", 1: "int8", 2: "int16", 3: "int32", 4: "float16", 5: "bfloat16"}
CODES = {name: code for code, name in DTYPES.items()}
BYTES = {"float32": 4, "int8": 1, "int16": 2, "int32": 4, "float16": 2, "bfloat16": 2}
SCALARS = {"float32": "<f", "int8": "<b", "int16": "<h", "int32": "<i", "float16": "<e"}
MAX_VARIABLES = 200_000  # of a model; the largest have some 10,000
EMBEDDINGS = "decoder/embeddings/"
HEAD = "decoder/projection/weight"


@dataclass(frozen=True)
class Variable:
    """A stored array: its dtype's name, its shape, and where its `nbytes` start in the file. `value`: that of a
    scalar."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    value: float | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Written:
    """An array to write. `data`: its elements' bytes, in row-major order, in any number of pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Iterable[bytes | memoryview]


@dataclass(frozen=True)
class Contents:
    """A model.bin: the name and revision of its specification, its variables by name, and alias -> variable."""

    spec: str
    revision: int
    variables: dict[str, Variable]
    aliases: dict[str, str]


def read(path: Path) -> Contents:
    """Read the headers of a model.bin; no array is read. Raises `UserError` if the file has another version, is cut
    off, continues after its end or contradicts itself, or if it has a name twice, an empty variable, an unknown dtype,
    or more variables than any model."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            (version,) = _unpack(file, "<I")
            if version != VERSION:
                raise UserError(
                    f"{path}: binary version {version} where {VERSION} is known; rebuild it with ctranslate2 4"
                )
            spec = _string(file)
            revision, count = _unpack(file, "<II")
            _check_count(path, count, "variables")
            variables: dict[str, Variable] = {}
            for _ in range(count):
                name = _string(file)
                if name in variables:
                    raise UserError(f"{path}: {name!r:.80} occurs twice; build it again")
                variables[name] = _variable(path, file, name)
                if file.tell() > size:
                    raise EOFError
            (count,) = _unpack(file, "<I")
            _check_count(path, count, "aliases")
            aliases: dict[str, str] = {}
            for _ in range(count):
                name, target = _string(file), _string(file)
                if name in variables or name in aliases:
                    raise UserError(f"{path}: {name!r:.80} occurs twice; build it again")
                if target not in variables:  # the engine silently ignores such an alias
                    raise UserError(f"{path}: {name!r:.80} is an alias of {target!r:.80}, which is not a variable")
                aliases[name] = target
            if file.tell() != size:
                raise UserError(f"{path}: goes on for {size - file.tell()} bytes after its end; build it again")
            return Contents(spec, revision, variables, aliases)
    except (EOFError, struct.error, UnicodeDecodeError):
        raise UserError(f"{path}: cut off, or not a CTranslate2 model; build it again") from None


def write(
    path: Path, spec: str, revision: int, variables: Iterable[Written], aliases: Sequence[tuple[str, str]]
) -> None:
    """Write a model.bin, byte for byte as ModelSpec._serialize does.

    Args:
        variables: sorted by name.
        aliases: (alias, variable); read after the last variable.

    Raises `UserError` for a variable of 4 GiB or more, which this version cannot hold.
    """
    with path.open("wb", buffering=0) as file:
        write_all(file, struct.pack("<I", VERSION) + _pack(spec) + struct.pack("<I", revision))
        place, count = file.tell(), 0
        write_all(file, struct.pack("<I", count))  # it is known at the end
        for each in variables:
            count += 1
            nbytes = math.prod(each.shape) * BYTES[each.dtype]
            if nbytes >= 2**32:
                has = f"{each.name} has {nbytes / 1e9:.1f} GB as {each.dtype}"
                raise UserError(f"{has}, and a variable of CTranslate2 at most 4.29; choose a smaller type")
            write_all(file, _pack(each.name) + struct.pack(f"<B{len(each.shape)}I", len(each.shape), *each.shape))
            write_all(file, struct.pack("<BI", CODES[each.dtype], nbytes))
            end = file.tell() + nbytes
            for data in each.data:
                write_all(file, data)
            if file.tell() != end:
                raise OSError(f"{path}: {each.name} ends {file.tell() - end} bytes after its place")
        pairs = b"".join(_pack(alias) + _pack(target) for alias, target in aliases)
        write_all(file, struct.pack("<I", len(aliases)) + pairs)
        file.seek(place)
        write_all(file, struct.pack("<I", count))


def bytes_per_token(variables: dict[str, Variable], compute_type: str | None = None) -> int:
    """Return the bytes of weights that decoding one token reads: all but the embedding table, unless it is also the
    head.

    Args:
        compute_type: CTranslate2's name of the type that it multiplies in and converts weights to at load; None: as
            stored.
    """
    tied = HEAD not in variables
    return sum(
        loaded_bytes(name, variable, compute_type) if compute_type else variable.nbytes
        for name, variable in variables.items()
        if tied or not name.startswith(EMBEDDINGS)
    )


def parts(compute_type: str) -> tuple[str, str]:
    """Return the types of integer matrices, empty without any, and of all else that a compute type is made of."""
    integer, _, floating = compute_type.rpartition("_")
    return (compute_type, "float32") if compute_type in ("int8", "int16") else (integer, floating)


def loaded_bytes(name: str, variable: Variable, compute_type: str) -> int:
    """Return the bytes of a variable once loaded. Matrices have the integer's width if the type has one."""
    integer, floating = parts(compute_type)
    if variable.dtype in ("int8", "int16") or (name.endswith("/weight") and len(variable.shape) == 2):
        return variable.numel * BYTES[integer or floating]
    return variable.numel * BYTES[floating] if "float" in variable.dtype else variable.nbytes


def _check_count(path: Path, count: int, of: str) -> None:
    if count > MAX_VARIABLES:  # a header of each is 20 bytes, and takes 300 here
        raise UserError(f"{path}: claims {count} {of}, which no model has; refused")


def _variable(path: Path, file: BinaryIO, name: str) -> Variable:
    """Read the header of one variable. The file is then at the end of its data."""
    (rank,) = _unpack(file, "<B")
    shape = _unpack(file, f"<{rank}I")
    dtype, nbytes = _unpack(file, "<BI")
    if dtype not in DTYPES:
        raise UserError(f"{path}: {name!r:.80} is of dtype {dtype}, which CTranslate2 does not have; build it again")
    found = Variable(DTYPES[dtype], shape, file.tell(), nbytes)
    if nbytes != found.numel * BYTES[found.dtype]:
        raise UserError(f"{path}: {name!r:.80} has {nbytes} bytes for {list(shape)} of {found.dtype}; build it again")
    if not nbytes:
        raise UserError(f"{path}: {name!r:.80} is empty, {list(shape)}; build it again")
    if not shape and found.dtype in SCALARS:
        (value,) = _unpack(file, SCALARS[found.dtype])
        return replace(found, value=value)
    file.seek(nbytes, 1)
    return found


def _unpack(file: BinaryIO, layout: str) -> tuple:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _pack(word: str) -> bytes:
    return struct.pack("<H", len(word) + 1) + word.encode() + b"\0"


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<H")
    return file.read(length)[:-1].decode("utf-8")
