"""The parsers on good files of which some bytes have changed; fuzz.py goes further, guided by coverage."""

from collections.abc import Callable
from pathlib import Path

import pytest
from forge import (
    gguf_array,
    gguf_key,
    gguf_tensor,
    gguf_text,
    gguf_texts,
    gguf_with,
    safetensors_with,
    tensor_pickle,
    zip_with,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantmill.checkpoint import gguf_file, safetensors_file, torch_zip
from quantmill.common.program import UserError

pytestmark = pytest.mark.long
FORMS = {"bin": torch_zip.read, "safetensors": safetensors_file.read}
HEADER = (
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"U8","shape":[2,4],"data_offsets":[8,16]}}'
)
GGUF_KEYS = (
    *(gguf_key("general.architecture", 8, gguf_text("llama")), gguf_key("general.alignment", 4, b"\x40\0\0\0")),
    *(
        gguf_texts("tokenizer.ggml.tokens", "a", "é"),
        gguf_array("scores", 6, bytes(4), bytes(4)),
        gguf_key("x", 7, b"\1"),
    ),
)
GGUF_TENSORS = gguf_tensor("a", (32, 2), 2), gguf_tensor("b", (2, 2, 2), 0, 64)
WRITE: dict[str, Callable[[Path], Path]] = {
    "bin": lambda path: zip_with(path, tensor_pickle(1, (3, 1), (1, 1))),
    "safetensors": lambda path: safetensors_with(path, HEADER, bytes(16)),
    "gguf": lambda path: gguf_with(path, GGUF_KEYS, GGUF_TENSORS, bytes(96), alignment=64),
}
changes = st.binary(min_size=4, max_size=55)  # hypothesis makes one text of bytes the quickest


def write_changed(folder: Path, form: str, changes: bytes) -> Path:
    """Change bytes of a good file, written once. Each 11 bytes of `changes` are a place, a length and bytes."""
    good, path = folder / "good", folder / "x"
    data = bytearray((good if good.exists() else WRITE[form](good)).read_bytes())
    for start in range(0, len(changes), 11):
        place = int.from_bytes(changes[start : start + 2]) % len(data)
        new = changes[start + 3 : start + 3 + sum(changes[start + 2 : start + 3]) % 9]
        data[place : place + len(new)] = new
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=changes)
def test_changed_bytes_are_refused_or_harmless(tmp_path: Path, form: str, changes: bytes) -> None:
    path = write_changed(tmp_path, form, changes)
    try:
        tensors = FORMS[form](path)
    except UserError as error:
        assert str(path) in str(error)
        return
    for tensor in tensors.values():
        assert sum(len(chunk) for chunk in tensor.chunks()) == tensor.nbytes


@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=changes)
def test_changed_gguf_is_refused_or_harmless(tmp_path: Path, changes: bytes) -> None:
    path = write_changed(tmp_path, "gguf", changes)
    try:
        found = gguf_file.read(path)
    except UserError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)
        return
    end = found.data_start
    for tensor in found.tensors.values():
        assert end <= tensor.offset
        assert tensor.offset % found.alignment == 0
        end = tensor.offset + tensor.nbytes
    assert end <= path.stat().st_size
