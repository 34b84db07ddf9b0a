"""Hostile files through the programs: nothing runs, memory stays under 200 MiB, one line names the file and the remedy,
and nothing appears under a final name."""

import io
import json
import os
import pickle
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from forge import Evil, safetensors_with, tensor_pickle, zip_with

MEMORY = 200 * 1024  # KiB
# the program, and at its end the most memory that it held
RUN = """
import atexit, runpy, sys
status = lambda: open('/proc/self/status').read().split('VmHWM:')[1].split()[0]
atexit.register(lambda: print(status()))
sys.path.insert(0, 'scripts')
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name='__main__')
"""
ONE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def refusal(tmp_path: Path, tools_python: Path, model: Path) -> Callable[[], str]:
    def run() -> str:
        before = sorted(tmp_path.iterdir())
        program = "scripts/bin_to_safetensors.py"
        command = [tools_python, "-c", RUN, program, model, tmp_path / "out", "--verify"]
        result = subprocess.run([*map(str, command)], cwd=REPO, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1, result.stdout + result.stderr
        # nothing converted, nothing half-done, nothing that a pickle made
        assert sorted(tmp_path.iterdir()) == before
        assert int(result.stdout) < MEMORY
        lines = result.stderr.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"error: {model}"), lines
        return lines[0]

    return run


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument)."""
    text = pickle.BINUNICODE + struct.pack("<I", len(argument)) + argument.encode()
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + text + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP


@pytest.mark.parametrize(
    ("module", "name", "argument"),
    [
        ("os", "system", "touch {}/ran"),
        ("posix", "system", "touch {}/ran"),
        ("builtins", "eval", "open('{}/ran', 'w')"),
        ("builtins", "exec", "open('{}/ran', 'w')"),
        ("torch.serialization", "load", "{}/ran"),
        ("torch._utils", "_rebuild_wrapper_subclass", "{}/ran"),
        ("collections", "OrderedDict.fromkeys", "{}/ran"),
    ],
)
def test_calls(model: Path, tmp_path: Path, refusal: Callable, module: str, name: str, argument: str) -> None:
    zip_with(model / "pytorch_model.bin", call(module, name, argument.format(tmp_path)))
    assert f"asks for {module}.{name}" in refusal()


@pytest.mark.parametrize("evil", [False, True])
def test_pickles_without_a_zip(model: Path, tmp_path: Path, refusal: Callable, evil: bool) -> None:
    content = Evil(tmp_path / "ran") if evil else {"weight": [1.0]}
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    assert "a bare pickle" in refusal()


def colliding_key(number: int) -> bytes:
    """The item {number * (2**61 - 1): None}; all such numbers have the hash 0."""
    return pickle.LONG1 + b"\x10" + (number * (2**61 - 1)).to_bytes(16, "little") + pickle.NONE


MARK, DICT, LIST = pickle.MARK, pickle.EMPTY_DICT, pickle.EMPTY_LIST
FORBIDDEN_ZOO = {
    "memo bomb": b"\x80\x02" + DICT + b"".join(b"r" + struct.pack("<I", i << 20) for i in range(4096)) + b".",
    "a million dicts": b"\x80\x02" + LIST + MARK + DICT * 5_000_000 + pickle.APPENDS + b".",
    "a million marks": b"\x80\x02" + MARK * 5_000_000 + b".",
    "a million memos": b"\x80\x04" + DICT + pickle.MEMOIZE * 5_000_000 + b".",
    "a long text": b"\x80\x02X" + struct.pack("<I", 2**31) + b"x" * 7_000_000 + b".",
    "a pickle that is too long": b"\x80\x02" + b"N" * 9_000_000 + b".",
    "letters for a shape": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuK\x04tQK\x00X" + struct.pack("<I", 7_000_000) + b"x" * 7_000_000 + b")\x89}tR."
    ),
    "a long tuple, again and again": (b"\x80\x02](" + b"N" * 400_000 + b"tq\x00a" + b"h\x00\x85a" * 2000 + b"."),
    "a tensor at the end of the world": tensor_pickle(2**62, (1,), (1,)),
    "one that overlaps itself": tensor_pickle(0, (2, 2, 2), (1, 1, 1)),
    "copies of a dict": (
        b"\x80\x02}q\x00(" + b"".join(b"X\x04\x00\x00\x00%04dN" % i for i in range(9999)) + b"u"
        b"ccollections\nOrderedDict\nq\x01" + b"h\x01h\x00\x85R" * 100_000 + b"."
    ),
    "keys that collide": b"\x80\x02}(" + b"".join(map(colliding_key, range(50_000))) + b"u.",
    "a name that moves the cursor": b"\x80\x02}X\x04\x00\x00\x00\x1b[2JNs.",
}


@pytest.mark.parametrize("pickled", FORBIDDEN_ZOO.values(), ids=FORBIDDEN_ZOO.keys())
def test_pickles_that_fill_memory_or_never_end(model: Path, refusal: Callable, pickled: bytes) -> None:
    zip_with(model / "pytorch_model.bin", pickled)
    assert "pytorch_model.bin: " in refusal()


def zip_of(*members: tuple[str, bytes]) -> bytearray:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return bytearray(buffer.getvalue())


GOOD = (("archive/data.pkl", tensor_pickle(0, (4,), (1,))), ("archive/data/0", bytes(16)))


def directory_entry(data: bytearray, number: int) -> int:
    """Where the directory's entry of a member begins."""
    position = data.index(b"PK\x01\x02")
    for _ in range(number):
        position = data.index(b"PK\x01\x02", position + 1)
    return position


def test_members_that_overlap(model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD)
    entry = directory_entry(data, 0)
    size = struct.unpack_from("<I", data, entry + 20)[0] + 8
    struct.pack_into("<II", data, entry + 20, size, size)
    (model / "pytorch_model.bin").write_bytes(data)
    assert "reaches into what follows it" in refusal()


def test_two_members_in_one_place(model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD, ("archive/data/1", bytes(16)))
    struct.pack_into(
        "<I", data, directory_entry(data, 2) + 42, struct.unpack_from("<I", data, directory_entry(data, 1) + 42)[0]
    )
    (model / "pytorch_model.bin").write_bytes(data)
    assert "reaches into what follows it" in refusal()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name(model: Path, refusal: Callable) -> None:
    (model / "pytorch_model.bin").write_bytes(zip_of(*GOOD, GOOD[1]))
    assert "two members are called archive/data/0" in refusal()


def test_encrypted_members(model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD)
    data[directory_entry(data, 1) + 8] |= 1
    (model / "pytorch_model.bin").write_bytes(data)
    assert "compressed or encrypted" in refusal()


def test_a_zip_bomb(model: Path, refusal: Callable) -> None:
    zip_with(model / "pytorch_model.bin", GOOD[0][1], bytes(300_000_000), zipfile.ZIP_DEFLATED)
    assert "compressed or encrypted" in refusal()


def test_a_directory_of_millions(model: Path, refusal: Callable) -> None:
    entry = b"PK\x01\x02" + bytes(42)
    count = 10_000_000 // len(entry)
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, count * len(entry), 0, 0)
    (model / "pytorch_model.bin").write_bytes(entry * count + end)
    assert "not a whole zip file" in refusal()


def test_a_directory_of_many_empty_members(model: Path, refusal: Callable) -> None:
    (model / "pytorch_model.bin").write_bytes(zip_of(*((f"{number}", b"") for number in range(60_000))))
    assert "without data.pkl" in refusal()


def test_two_checkpoints_in_one_file(model: Path, refusal: Callable) -> None:
    (model / "pytorch_model.bin").write_bytes(zip_of(*GOOD, ("other/data.pkl", GOOD[0][1])))
    assert "holds two data.pkl" in refusal()


def test_a_member_beyond_the_file(model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD)
    struct.pack_into("<I", data, directory_entry(data, 1) + 42, 2**31)
    (model / "pytorch_model.bin").write_bytes(data)
    assert "is not where the zip's directory says" in refusal()


def test_damaged_bytes_of_a_tensor(model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD)
    data[data.index(b"archive/data/0") + len("archive/data/0")] ^= 1
    (model / "pytorch_model.bin").write_bytes(data)
    assert "their CRC is wrong" in refusal()


def test_a_pointer_instead_of_the_file(model: Path, refusal: Callable) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"
    for name in ("pytorch_model.bin", "model.safetensors"):
        (model / name).write_bytes(pointer)
        assert "git lfs pull" in refusal()


HEADERS = {
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
def test_safetensors_headers(model: Path, refusal: Callable, header: bytes) -> None:
    safetensors_with(model / "model.safetensors", header)
    assert "its header is damaged" in refusal()


def sharded(model: Path, *names: str, **weight_map: str) -> None:
    """Write a shard of a tensor `a` under each name, and an index."""
    for name in names:
        safetensors_with(model / name, ONE)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/../b", "..", "", "a\0b"])
def test_shards_outside_the_folder(model: Path, refusal: Callable, name: str) -> None:
    sharded(model, a=name)
    assert "names the shard" in refusal()


@pytest.mark.parametrize("name", ["quantmill.json", "tokenizer.json", ".hidden.safetensors", "weights.bin"])
def test_shards_that_are_no_weight_files(model: Path, refusal: Callable, name: str) -> None:
    sharded(model, name, a=name)
    assert "which is no .safetensors file" in refusal()


def test_links_that_lead_out(model: Path, tmp_path: Path, refusal: Callable) -> None:
    safetensors_with(tmp_path / "elsewhere", ONE)
    sharded(model, a=FIRST)
    (model / FIRST).symlink_to(tmp_path / "elsewhere")
    assert "link that leads out of the model's folder" in refusal()


def test_a_tokenizer_that_is_a_link(model: Path, tmp_path: Path, refusal: Callable) -> None:
    (tmp_path / "secret").write_text("secret")
    safetensors_with(model / "model.safetensors", ONE)
    (model / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert "tokenizer.json: is a link that leads out" in refusal()


def test_a_manifest_gives_links_no_licence(model: Path, tmp_path: Path, refusal: Callable) -> None:
    (tmp_path / "secret").write_text("secret")
    safetensors_with(model / "model.safetensors", ONE)
    (model / "tokenizer.json").symlink_to(tmp_path / "secret")
    (model / "quantmill.json").write_text('{"source": {}, "files": {}}')
    assert "tokenizer.json: is a link that leads out" in refusal()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "quantmill.json"])
def test_pipes(model: Path, refusal: Callable, name: str) -> None:
    if name != "model.safetensors":
        safetensors_with(model / "model.safetensors", ONE)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    if name == "model.safetensors.index.json":  # a pipe is no index, and the single file is a whole model
        (model / "model.safetensors").unlink()
    line = refusal()
    assert "missing" in line or "holds no weights" in line


MANIFESTS = ["{}", "x", "[]", '{"source": "abc"}', "[" * 100_000, '{"source": {}, "x": [' + "[]," * 900_000 + "[]]}"]


@pytest.mark.parametrize("content", MANIFESTS, ids=["empty", "no JSON", "list", "no source", "deep", "long"])
def test_manifests_that_are_none(model: Path, refusal: Callable, content: str) -> None:
    safetensors_with(model / "model.safetensors", ONE)
    (model / "quantmill.json").write_text(content)
    assert "quantmill.json: is " in refusal()


def test_a_long_name_in_an_index(model: Path, refusal: Callable) -> None:
    sharded(model, FIRST, **{"一" * 2_000_000: FIRST})
    assert "impossible entry" in refusal()


def test_a_config_of_15_megabytes(model: Path, refusal: Callable) -> None:
    (model / "config.json").write_text(json.dumps({"a": [{f"{n:x}一": "二"} for n in range(390_000)]}))
    safetensors_with(model / "model.safetensors", ONE)
    assert "config.json: no valid JSON (over 4 MiB)" in refusal()


def test_a_shard_that_is_missing(model: Path, refusal: Callable) -> None:
    sharded(model, FIRST, a=FIRST, b=SECOND)
    assert f"{SECOND}: is missing" in refusal()


def test_a_shard_that_is_a_pipe(model: Path, refusal: Callable) -> None:
    sharded(model, FIRST, a=FIRST, b=SECOND)
    os.mkfifo(model / SECOND)
    assert f"{SECOND}: is missing" in refusal()


def test_a_shard_that_nobody_names(model: Path, refusal: Callable) -> None:
    sharded(model, FIRST, SECOND, a=FIRST)
    assert f"{SECOND}: holds weights, but model.safetensors.index.json does not name it" in refusal()


def test_a_single_file_beside_shards(model: Path, refusal: Callable) -> None:
    sharded(model, FIRST, "model.safetensors", a=FIRST)
    assert "model.safetensors: holds weights, but" in refusal()


def test_shards_without_an_index(model: Path, refusal: Callable) -> None:
    safetensors_with(model / FIRST, ONE)
    assert f"{FIRST}: a shard, but its index is not there" in refusal()


def test_two_shards_that_hold_one_name(model: Path, refusal: Callable) -> None:
    sharded(model, FIRST, SECOND, a=FIRST, b=SECOND)
    assert "a is also in" in refusal()


def test_an_index_that_names_a_tensor_twice(model: Path, refusal: Callable) -> None:
    sharded(model, FIRST, SECOND)
    index = model / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')
    assert "the key 'a' stands twice" in refusal()


def test_an_index_of_another_model(model: Path, refusal: Callable) -> None:
    sharded(model, FIRST, a=FIRST, b=FIRST)
    assert f"{FIRST}: lacks b, which the index says it holds" in refusal()


def test_a_truncated_shard(model: Path, refusal: Callable) -> None:
    safetensors_with(model / "model.safetensors", ONE, bytes(4))
    assert "its header tells of" in refusal()


def test_heads_that_differ(model: Path, refusal: Callable) -> None:
    entries = ("model.embed_tokens.weight", "lm_head.weight")
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(entries)}
    safetensors_with(model / "model.safetensors", json.dumps(header).encode(), b"\1\2")
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight differs from the embeddings that config.json ties it to" in refusal()


def test_a_head_of_another_dtype_is_no_tied_one(model: Path, refusal: Callable) -> None:
    entries = {"model.embed_tokens.weight": "F16", "lm_head.weight": "BF16"}
    header = {
        name: {"dtype": dtype, "shape": [1], "data_offsets": [2 * i, 2 * i + 2]}
        for i, (name, dtype) in enumerate(entries.items())
    }
    safetensors_with(model / "model.safetensors", json.dumps(header).encode(), bytes(4))
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight differs from the embeddings" in refusal()


def test_more_tensors_than_a_bin_can_name(model: Path, tmp_path: Path, tools_python: Path) -> None:
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    safetensors_with(model / "model.safetensors", json.dumps({f"t{n}": entry for n in range(60_000)}).encode(), b"")
    command = [tools_python, "-c", RUN, "scripts/safetensors_to_bin.py", model, tmp_path / "out"]
    result = subprocess.run([*map(str, command)], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert "60000 tensors would come into one file" in result.stderr
    assert int(result.stdout) < MEMORY
