"""safetensors files and indexes that lie: one line names the file and what to do."""

import json
import struct
from pathlib import Path

import pytest
from forge import safetensors_with

from quantmill.checkpoint import safetensors_file, shards
from quantmill.common.program import UserError


def test_deeply_nested_headers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its header is damaged"):
        safetensors_file.read(safetensors_with(tmp_path / "x.safetensors", b"[" * 100_000))


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


def test_a_tensor_that_the_index_promises_and_no_shard_has(tmp_path: Path) -> None:
    safetensors_with(tmp_path / "a.safetensors", b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}')
    weight_map = {"a": "a.safetensors", "b": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"a\.safetensors: lacks b, which the index says it holds"):
        shards.find(tmp_path).tensors()


def test_index_that_reaches_outside_or_names_a_missing_shard(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for name, message in (
        ("../../secret", "outside"),
        ("..", "outside"),
        ("", "outside"),
        ("absent.safetensors", "missing"),
    ):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UserError, match=message):
            shards.find(tmp_path)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no weights; looked for model\.safetensors"):
        shards.find(tmp_path)
