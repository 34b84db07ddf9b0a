#!/usr/bin/env python3
"""Coverage-guided fuzzing of the parsers with atheris; not part of the test suite.

    python tests/checkpoint/fuzz.py bin|pickle|safetensors|gguf CORPUS [-max_total_time=1800]
        [other options of libFuzzer]

Whatever the bytes are, a parser either refuses them with one `UserError`, or finds tensors that lie inside the file and
that survive a round trip through the other form. What our reader of GGUF takes, ggml's own must take too and find the
same tensors: GGML_BASE names its library, libggml-base.so. Anything else is a crash, whose input libFuzzer keeps.
Fuzzed in docs/FUZZING.md; needs atheris and envs/tools' packages.
"""

import ctypes
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
with atheris.instrument_imports(include=["checkpoint", "pickle", "zipfile", "json"]):
    from quantmill.checkpoint import copying, gguf_file, gguf_header, safetensors_file, torch_zip
    from quantmill.common import bounded_json  # noqa: F401
    from quantmill.common.program import UserError

FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
LARGE = 1 << 20  # bytes of tensors beyond which they are not read


class Parameters(ctypes.Structure):
    """gguf_init_params: no tensor is loaded."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def ggml_tensors(path: Path) -> list[tuple[str, int, int]]:
    """Name, place in the file and bytes of each tensor that ggml finds."""
    content = ctypes.c_void_p(ggml.gguf_init_from_file(str(path).encode(), Parameters(True, None)))
    if not content:
        raise AssertionError("ggml refuses it")
    start, count = ggml.gguf_get_data_offset(content), ggml.gguf_get_n_tensors(content)
    asked = (ggml.gguf_get_tensor_name, ggml.gguf_get_tensor_offset, ggml.gguf_get_tensor_size)
    found = [[ask(content, ctypes.c_int64(number)) for ask in asked] for number in range(count)]
    ggml.gguf_free(content)
    return [(name.decode(), start + offset, nbytes) for name, offset, nbytes in found]


def read_gguf(data: bytes) -> None:
    """Read the bytes as GGUF, and hold the tensors against the file, and against what ggml finds."""
    source = FOLDER / "source"
    source.write_bytes(data)
    try:
        found = gguf_file.read(source)
    except UserError as error:
        if str(source) not in str(error):
            raise AssertionError(f"names no file: {error}") from error
        return
    tensors = [(tensor.name, tensor.offset, tensor.nbytes) for tensor in found.tensors.values()]
    ends = [found.data_start, *(offset + nbytes for _, offset, nbytes in tensors)]
    if tensors and (ends[-1] > len(data) or any(end > each[1] for end, each in zip(ends, tensors, strict=False))):
        raise AssertionError("tensors that overlap, or lie beyond the file")
    for value in found.metadata.values():
        list(value) if isinstance(value, gguf_header.Texts) else repr(value)
    if ggml and tensors != ggml_tensors(source):
        raise AssertionError("ggml finds others")


def read(data: bytes) -> None:
    """Read the bytes as the form that is fuzzed, and convert what is found to the other form and back."""
    source, other, back = (FOLDER / name for name in ("source", "other", "back"))
    if form == "pickle":
        with zipfile.ZipFile(source, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/data/0", bytes(range(64)))
    else:
        source.write_bytes(data)
    one, two = (safetensors_file, torch_zip) if form == "safetensors" else (torch_zip, safetensors_file)
    try:
        tensors = one.read(source)
    except UserError as error:
        if str(source) not in str(error):
            raise AssertionError(f"names no file: {error}") from error
        return
    if sum(tensor.nbytes for tensor in tensors.values()) > LARGE:
        return
    two.write(other, tensors.values())
    one.write(back, two.read(other).values())
    again = one.read(back)
    if set(again) != set(tensors) or not all(copying.equal_bytes(tensors[name], again[name]) for name in tensors):
        raise AssertionError("the round trip changed the tensors")


if __name__ == "__main__":
    form = sys.argv.pop(1)
    ggml = ctypes.CDLL(os.environ["GGML_BASE"]) if "GGML_BASE" in os.environ else None
    if ggml:
        ggml.gguf_init_from_file.restype = ctypes.c_void_p
        ggml.gguf_get_tensor_name.restype = ctypes.c_char_p
        for name in ("gguf_get_data_offset", "gguf_get_n_tensors", "gguf_get_tensor_offset", "gguf_get_tensor_size"):
            getattr(ggml, name).restype = ctypes.c_size_t
    atheris.Setup(sys.argv, read_gguf if form == "gguf" else read)
    atheris.Fuzz()
