"""Hostile safetensors and folders through the programs: memory stays small, one line names file and remedy."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MEMORY
from forge import safetensors_with

from quantmill.checkpoint import portable, shards
from quantmill.common.program import UserError

ONE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


HEADERS = {
    "deep lists": b"[" * 100_000,
    "a key twice": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2)[:-1] + b"}",
    "a shape twice": b'{"a":{"dtype":"F32","shape":[1],"shape":[2],"data_offsets":[0,8]}}',
    "millions of lists": b'{"__metadata__":[' + b"[]," * 5_000_000 + b"[]]}",
    "millions of keys": b"{" + b",".join(b'"%07d":1' % number for number in range(1_000_000)) + b"}",
    "a text of 15 MB": b'{"' + b"x" * 15_000_000 + '\N{PILE OF POO}"'.encode() + b":1}",
    "a header of 20 MB": ONE + b" " * 20_000_000,
    "a dtype that is a list": b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}',
    "a size that is true": b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    "a size that is NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
    "a size with 5,000 digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
    "thousands of dimensions": b'{"a":{"dtype":"F32","shape":[0' + b",1" * 20_000 + b'],"data_offsets":[0,0]}}',
    "sizes beyond numbers": b'{"a":{"dtype":"F32","shape":[0,4611686018427387904,8],"data_offsets":[0,0]}}',
    "half a surrogate": b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "a name with a line end": b'{"a\\n":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "no UTF-8": b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_safetensors_headers(hostile_model: Path, refusal: Callable, header: bytes) -> None:
    safetensors_with(hostile_model / "model.safetensors", header)
    assert "its header is damaged" in refusal()


def write_shards(hostile_model: Path, *names: str, **weight_map: str) -> None:
    """Write a shard of a tensor `a` under each name, and an index."""
    for name in names:
        safetensors_with(hostile_model / name, ONE)
    (hostile_model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


SHARDS = [  # files, the index's weight_map, and what is said of them
    *([(), {"a": name}, "names the shard"] for name in ("../../secret", "/etc/passwd", "a/../b", "..", "", "a\0b")),
    *(
        [(name,), {"a": name}, "which is not a .safetensors file"]
        for name in ("quantmill.json", "tokenizer.json", ".hidden.safetensors", "weights.bin")
    ),
    [(FIRST,), {"一" * 2_000_000: FIRST}, "impossible entry"],
    [(FIRST,), {"a": FIRST, "b": SECOND}, f"{SECOND}: is missing"],
    [(FIRST, SECOND), {"a": FIRST}, f"{SECOND}: holds weights, but model.safetensors.index.json does not name it"],
    [(FIRST, "model.safetensors"), {"a": FIRST}, "model.safetensors: holds weights, but"],
    [(FIRST, SECOND), {"a": FIRST, "b": SECOND}, "a is also in"],
    [(FIRST,), {"a": FIRST, "b": FIRST}, f"{FIRST}: lacks b, which the index says it holds"],
]


@pytest.mark.parametrize("case", range(len(SHARDS)))
def test_indexes_that_lie(hostile_model: Path, refusal: Callable, case: int) -> None:
    names, weight_map, message = SHARDS[case]
    write_shards(hostile_model, *names, **weight_map)
    assert message in refusal()


def test_links_that_lead_out(hostile_model: Path, tmp_path: Path, refusal: Callable) -> None:
    safetensors_with(tmp_path / "elsewhere", ONE)
    write_shards(hostile_model, a=FIRST)
    (hostile_model / FIRST).symlink_to(tmp_path / "elsewhere")
    assert "link that leads out of the model's folder" in refusal()


@pytest.mark.parametrize("manifest", ["", '{"source": {}, "files": {}}'])
def test_a_tokenizer_that_is_a_link(hostile_model: Path, tmp_path: Path, refusal: Callable, manifest: str) -> None:
    """Refuse it, also in a folder that claims to be Quantmill's."""
    (tmp_path / "secret").write_text("secret")
    safetensors_with(hostile_model / "model.safetensors", ONE)
    (hostile_model / "tokenizer.json").symlink_to(tmp_path / "secret")
    if manifest:
        (hostile_model / "quantmill.json").write_text(manifest)
    assert "tokenizer.json: is a link that leads out" in refusal()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "quantmill.json"])
def test_pipes(hostile_model: Path, refusal: Callable, name: str) -> None:
    if name != "model.safetensors":
        safetensors_with(hostile_model / "model.safetensors", ONE)
    (hostile_model / name).unlink(missing_ok=True)
    os.mkfifo(hostile_model / name)
    assert f"{hostile_model / name}: is a pipe, not a file" in refusal()


MANIFESTS = ["{}", "x", "[]", '{"source": "abc"}', "[" * 100_000, '{"source": {}, "x": [' + "[]," * 900_000 + "[]]}"]


@pytest.mark.parametrize("content", MANIFESTS, ids=["empty", "no JSON", "list", "no source", "deep", "long"])
def test_damaged_manifests(hostile_model: Path, refusal: Callable, content: str) -> None:
    safetensors_with(hostile_model / "model.safetensors", ONE)
    (hostile_model / "quantmill.json").write_text(content)
    assert "quantmill.json: is " in refusal()


def test_a_config_of_15_megabytes(hostile_model: Path, refusal: Callable) -> None:
    (hostile_model / "config.json").write_text(json.dumps({"a": [{f"{n:x}一": "二"} for n in range(390_000)]}))
    safetensors_with(hostile_model / "model.safetensors", ONE)
    assert "config.json: not valid JSON (over 4 MiB)" in refusal()


def test_a_shard_that_is_a_pipe(hostile_model: Path, refusal: Callable) -> None:
    write_shards(hostile_model, FIRST, a=FIRST, b=SECOND)
    os.mkfifo(hostile_model / SECOND)
    assert f"{SECOND}: is a pipe, not a file" in refusal()


def test_shards_without_an_index(hostile_model: Path, refusal: Callable) -> None:
    safetensors_with(hostile_model / FIRST, ONE)
    assert f"{FIRST}: a shard, but its index is not there" in refusal()


def test_an_index_that_names_a_tensor_twice(hostile_model: Path, refusal: Callable) -> None:
    write_shards(hostile_model, FIRST, SECOND)
    index = hostile_model / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')
    assert "the key 'a' occurs twice" in refusal()


def test_a_truncated_shard(hostile_model: Path, refusal: Callable) -> None:
    safetensors_with(hostile_model / "model.safetensors", ONE, bytes(4))
    assert "its header claims" in refusal()


@pytest.mark.parametrize(("dtypes", "data"), [(("U8", "U8"), b"\1\2"), (("F16", "BF16"), bytes(4))])
def test_heads_that_differ(hostile_model: Path, refusal: Callable, dtypes: tuple[str, str], data: bytes) -> None:
    size, header = len(data) // 2, {}
    for place, name in enumerate(("model.embed_tokens.weight", "lm_head.weight")):
        header[name] = {"dtype": dtypes[place], "shape": [1], "data_offsets": [place * size, (place + 1) * size]}
    safetensors_with(hostile_model / "model.safetensors", json.dumps(header).encode(), data)
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (hostile_model / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight differs from the embeddings that config.json ties it to" in refusal()


def test_more_tensors_than_a_bin_can_name(hostile_model: Path, tmp_path: Path, run_program: Callable) -> None:
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{n}": entry for n in range(60_000)}).encode()
    safetensors_with(hostile_model / "model.safetensors", header, b"")
    result = run_program("checkpoint.to_bin", hostile_model, tmp_path / "out")
    assert "60000 tensors would come into one file" in result.stderr
    assert result.memory < MEMORY


def test_a_models_programs_are_not_carried_along(tmp_path: Path) -> None:
    safetensors_with(tmp_path / "model.safetensors", ONE, b"12345678")
    for name in ("config.json", "tokenizer.json", "modeling_evil.py"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in shards.find(tmp_path).others()] == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(("opens", "closes"), [('{"a":', "}"), ("[", "]")])
def test_a_deeply_nested_config_is_refused(tmp_path: Path, opens: str, closes: str) -> None:
    safetensors_with(tmp_path / "model.safetensors", ONE, b"12345678")
    for levels in (98, 600):
        (tmp_path / "config.json").write_text('{"b":' + opens * levels + "1" + closes * levels + "}")
        if levels == 98:
            portable.config(shards.find(tmp_path).config())
    with pytest.raises(UserError, match=r"config\.json: is nested more than 100 deep, which no model's is; refused$"):
        shards.find(tmp_path).config()


@pytest.mark.parametrize(
    "config", [{"attribute_map": {"auto_map": "a"}}, {"text_config": [{"attribute_map": {}, "vocab_size": 1}]}]
)
def test_keys_that_go_by_other_names_are_refused(tmp_path: Path, config: dict) -> None:
    safetensors_with(tmp_path / "model.safetensors", ONE, b"12345678")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json: has an attribute_map, which gives keys other names"):
        shards.find(tmp_path).config()
