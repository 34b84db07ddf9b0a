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
    """The pickle of {"weight": tensor} as torch writes it, with any numbers in it."""

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
