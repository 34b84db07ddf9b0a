"""Make checkpoint files that lie, each in a few lines."""

import io
import pickle
import struct
import zipfile
from pathlib import Path


class Evil:
    """Unpickled by pickle itself, this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def zip_with(path: Path, pickled: bytes, storage: bytes = bytes(16), compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", storage)
    return path


def tensor_pickle(offset: int, shape: tuple, stride: tuple, elements: int = 4) -> bytes:
    """Pickle {"weight": tensor} like torch, with any numbers in it."""

    class Storage:
        pass

    class View:
        def __reduce__(self) -> tuple:
            return rebuild, (Storage(), offset, shape, stride, False, {})

    def rebuild() -> None: ...

    class Global(pickle._Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", FloatStorage, "0", "cpu", elements) if isinstance(value, Storage) else None

        def save_global(self, value: object, name: str | None = None) -> None:
            module, attribute = {"rebuild": ("torch._utils", "_rebuild_tensor_v2")}.get(
                getattr(value, "__name__", ""), ("torch", "FloatStorage")
            )
            self.write(pickle.GLOBAL + f"{module}\n{attribute}\n".encode())

        dispatch = pickle._Pickler.dispatch | {type(rebuild): save_global, type: save_global}

    class FloatStorage:
        pass

    buffer = io.BytesIO()
    Global(buffer, protocol=2).dump({"weight": View()})
    return buffer.getvalue()


def safetensors_with(path: Path, header: bytes, data: bytes = bytes(8)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def gguf_text(text: str | bytes) -> bytes:
    """Encode a text for GGUF."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_key(key: str | bytes, kind: int, value: bytes) -> bytes:
    """Encode a key of GGUF's metadata with a value of a type."""
    return gguf_text(key) + struct.pack("<I", kind) + value


def gguf_array(key: str, kind: int, *values: bytes, count: int | None = None) -> bytes:
    """Encode a key with an array, which may claim another number of values."""
    return gguf_key(key, 9, struct.pack("<IQ", kind, len(values) if count is None else count) + b"".join(values))


def gguf_tensor(name: str | bytes, dimensions: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    """Encode GGUF's description of a tensor; the innermost dimension comes first."""
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return gguf_text(name) + sizes + struct.pack("<IQ", kind, offset)


def gguf_with(
    path: Path,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    start: bytes = b"GGUF\x03\0\0\0",
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> Path:
    """Write a GGUF file: magic, version, counts of tensors and keys (which may be wrong), these, and aligned data."""
    head = start + struct.pack("<QQ", *(counts or (len(tensors), len(keys)))) + b"".join((*keys, *tensors))
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def gguf_texts(key: str, *values: str | bytes) -> bytes:
    """Encode a key with an array of texts."""
    return gguf_array(key, 8, *map(gguf_text, values))


def gguf_part(folder: Path, number: int, count: int, *names: str, tensors: int = 2, name: str | None = None) -> Path:
    """Write a part, counted from 0, of a split model, with tensors of these names."""
    keys = gguf_key("split.no", 2, struct.pack("<H", number)), gguf_key("split.count", 2, struct.pack("<H", count))
    keys += (gguf_key("split.tensors.count", 5, struct.pack("<i", tensors)),)
    held = tuple(gguf_tensor(each, (8,), 0, 32 * place) for place, each in enumerate(names))
    return gguf_with(folder / (name or f"m-{number + 1:05}-of-{count:05}.gguf"), keys, held, bytes(32 * len(names)))
