"""The pickle inside a torch zip: read without running anything, and written without torch.

A state_dict pickles as a dict of name -> torch._utils._rebuild_tensor_v2(storage, offset, size, stride, …), where a
storage is a persistent id ("storage", type, key, location, elements). dtypes that have no storage type of their own
(float8, the wider unsigned integers) pickle as _rebuild_tensor_v3 with an untyped storage, counted in bytes, and the
dtype beside it (torch/_tensor.py, Tensor._reduce_ex_internal).
"""

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from quantmill.checkpoint.tensor import DTYPE_BYTES, row_major

# safetensors' dtype -> torch's storage type
TYPED = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "C64": "ComplexFloatStorage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}
# safetensors' dtype -> torch's dtype, for those that have no storage type
UNTYPED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}


class TooLong(ValueError):
    """The pickle is larger than any checkpoint's, damaged or not."""


class ForbiddenGlobal(ValueError):
    """The pickle names a global that no plain checkpoint needs."""


@dataclass(frozen=True)
class Name:
    """A storage type or a dtype that the pickle names: safetensors' dtype, or None for an untyped storage."""

    dtype: str | None


@dataclass(frozen=True)
class Storage:
    """A storage: the zip member's key, and its dtype and bytes according to the pickle."""

    dtype: str | None
    key: str
    nbytes: int


@dataclass(frozen=True)
class View:
    """A tensor: a dtype, and the offset, shape and stride in elements of its storage."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_v2(
    storage: Storage, offset: int, size: tuple, stride: tuple, grad: Any = None, hooks: Any = None, metadata: Any = None
) -> View:
    return _rebuild_v3(storage, offset, size, stride, grad, hooks, storage, metadata)


def _rebuild_v3(
    storage: Storage,
    offset: int,
    size: tuple,
    stride: tuple,
    _grad: Any,
    _hooks: Any,
    dtype: Name | Storage,
    metadata: Any = None,
) -> View:
    if metadata:  # torch's note that the numbers must be conjugated or negated
        raise ValueError("a conjugated or negated view; save its .resolve_conj().resolve_neg()")
    if not (isinstance(storage, Storage) and isinstance(size, tuple) and isinstance(stride, tuple)) or not dtype.dtype:
        raise ValueError("not a tensor")
    return View(storage, dtype.dtype, offset, size, stride)


def _ordered_dict() -> OrderedDict:
    """Return an empty one, as pickle creates it. With arguments, repeated copies could fill memory."""
    return OrderedDict()


def _rebuild_parameter(data: View, *_: Any) -> View:
    return data


_GLOBALS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): Name(None),
    **{("torch", name): Name(dtype) for table in (TYPED, UNTYPED) for dtype, name in table.items()},
}


# those that torch.save writes, in protocols 2 to 4; some others build objects or allocate any size
OPCODES = {
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE),
    *(pickle.BINPERSID, pickle.BUILD, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
}

MAX_TUPLE = 64
MAX_OPERATIONS = 1_200_000  # 37,000 tensors; each leaves at most about 100 bytes in memory


def _limit_operations(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Stop at more operations than any checkpoint's: an opcode of one byte can create an object of a hundred."""

    def wrapper(unpickler: Any) -> None:
        unpickler.operations += 1
        if unpickler.operations > MAX_OPERATIONS:
            raise TooLong(f"more than {MAX_OPERATIONS} operations")
        load(unpickler)

    return wrapper


def _require_names(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Put items into a dict if their keys, at `keys` of the stack, are texts. Keys of other types can be chosen to
    collide, which takes hours."""

    def wrapper(unpickler: Any) -> None:
        if not all(isinstance(key, str) for key in unpickler.stack[keys]):
            raise ValueError("a key that is not a text")
        load(unpickler)

    return wrapper


def _limit_tuples(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Load a tuple at most three deep and 64 long: freeing very deep ones overflows the interpreter's stack."""

    def wrapper(unpickler: Any) -> None:
        load(unpickler)
        if len(unpickler.stack[-1]) > MAX_TUPLE:
            raise ValueError("a tuple that is too long")
        inner = (item for item in unpickler.stack[-1] if isinstance(item, tuple))
        if any(isinstance(item, tuple) for each in inner for item in each):
            raise ValueError("tuples nested too deep")

    return wrapper


class _Unpickler(pickle._Unpickler):
    """The pure-Python unpickler. The C one allocates gigabytes for a memo index that a file makes up."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) in OPCODES
    }
    operations = 0

    def load_build(self) -> None:
        """Drop the attributes of a state_dict (its `_metadata`), the only valid use of this opcode."""
        self.stack.pop()
        if type(self.stack[-1]) is not OrderedDict:
            raise ValueError("attributes for something else than a state_dict")

    dispatch[pickle.BUILD[0]] = load_build
    for (_code,) in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[_code] = _limit_tuples(dispatch[_code])
    for (_code,), _keys in ((pickle.SETITEM, slice(-2, -1)), (pickle.SETITEMS, slice(None, None, 2))):
        dispatch[_code] = _require_names(dispatch[_code], _keys)
    for _code, _load in dispatch.items():
        dispatch[_code] = _limit_operations(_load)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise ForbiddenGlobal(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage_type, key, _location, elements = pid
        types = (type(storage_type), type(key), type(elements))
        if kind != "storage" or types != (Name, str, int):
            raise ValueError("unknown persistent id")
        width = DTYPE_BYTES[storage_type.dtype] if storage_type.dtype else 1
        return Storage(storage_type.dtype, key, elements * width)


def loads(data: bytes) -> Any:
    """Return the contents of a torch pickle, with a `View` in place of each tensor. Raises `ForbiddenGlobal` for a
    global that a plain state_dict does not have. Damage raises whatever pickle's machine runs into
    (`pickle.UnpicklingError`, ValueError, TypeError, AttributeError, IndexError, KeyError, EOFError)."""
    return _Unpickler(io.BytesIO(data), encoding="utf-8").load()


def dumps(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Pickle a state_dict of contiguous tensors, (name, dtype, shape) each; the i-th storage has the key "i". Protocol
    2, as torch.save's, and without a memo: the same tensors always give the same bytes."""
    parts = [pickle.PROTO + b"\x02", pickle.EMPTY_DICT, pickle.MARK]
    for key, (name, dtype, shape) in enumerate(tensors):
        parts += [_text(name), *_tensor(dtype, shape, math.prod(shape), str(key))]
    return b"".join([*parts, pickle.SETITEMS, pickle.STOP])


def _tensor(dtype: str, shape: tuple[int, ...], numel: int, key: str) -> list[bytes]:
    typed = dtype in TYPED
    rebuild = b"_rebuild_tensor_v2" if typed else b"_rebuild_tensor_v3"
    storage_type = _global("torch", TYPED[dtype]) if typed else _global("torch.storage", "UntypedStorage")
    elements = numel if typed else numel * DTYPE_BYTES[dtype]
    storage = [_text("storage"), storage_type, _text(key), _text("cpu"), _integer(elements)]
    return [
        pickle.GLOBAL + b"torch._utils\n" + rebuild + b"\n",
        pickle.MARK,
        *(pickle.MARK, *storage, pickle.TUPLE, pickle.BINPERSID),
        _integer(0),
        *(pickle.MARK, *map(_integer, shape), pickle.TUPLE),
        *(pickle.MARK, *map(_integer, row_major(shape)), pickle.TUPLE),
        pickle.NEWFALSE,  # requires_grad
        *(_global("collections", "OrderedDict"), pickle.EMPTY_TUPLE, pickle.REDUCE),  # backward hooks
        *([] if typed else [_global("torch", UNTYPED[dtype])]),
        pickle.TUPLE,
        pickle.REDUCE,
    ]


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    encoded = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(encoded)]) + encoded
