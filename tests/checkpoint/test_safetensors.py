"""safetensors files and indexes that lie: one line names the file and what to do."""

import struct
from pathlib import Path

import pytest
from forge import safetensors_with

from quantmill.checkpoint import safetensors_file, shards
from quantmill.common.program import UserError


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} ', None),
        (b"{", "its header is damaged"),
        (b"[]", "its header is damaged"),
        (b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}', "dtype 'F99'"),
        (b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', "its header is damaged"),
        (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "its header is damaged"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "is 70 bytes where its header claims 66"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "overlap another tensor's or leave a gap"),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "overlap another tensor's or leave a gap",
        ),
    ],
)
def test_safetensors_headers_that_lie(tmp_path: Path, header: bytes, message: str | None) -> None:
    path = safetensors_with(tmp_path / "x.safetensors", header)
    if message is None:
        assert list(safetensors_file.read(path)) == ["a"]
        return
    with pytest.raises(UserError, match=message):
        safetensors_file.read(path)


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<Q", 10**9) + b"{}")
    with pytest.raises(UserError, match="its header does not fit"):
        safetensors_file.read(tmp_path / "x")


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no weights; looked for model\.safetensors"):
        shards.find(tmp_path)
