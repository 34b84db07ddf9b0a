"""The two parsers on good files of which some bytes have changed; fuzz.py goes further, guided by coverage."""

from pathlib import Path

import pytest
from forge import safetensors_with, tensor_pickle, zip_with
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint import safetensors_file, torch_zip
from common.program import UserError

FORMS = {"bin": torch_zip.read, "safetensors": safetensors_file.read}
HEADER = (
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"U8","shape":[2,4],"data_offsets":[8,16]}}'
)
changes = st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=8)), min_size=1, max_size=5)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=changes)
def test_changed_bytes_are_refused_or_harmless(tmp_path: Path, form: str, changes: list[tuple[int, bytes]]) -> None:
    path = tmp_path / "x"
    if form == "bin":
        zip_with(path, tensor_pickle(1, (3, 1), (1, 1)))
    else:
        safetensors_with(path, HEADER, bytes(16))
    data = bytearray(path.read_bytes())
    for place, new in changes:
        data[place % len(data) : place % len(data) + len(new)] = new
    path.write_bytes(data)
    try:
        tensors = FORMS[form](path)
    except UserError as error:
        assert str(path) in str(error)
        return
    for tensor in tensors.values():
        assert sum(len(chunk) for chunk in tensor.chunks()) == tensor.nbytes
