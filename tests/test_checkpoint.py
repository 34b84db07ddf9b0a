"""Checkpoint readers and writers against torch's and safetensors' own, and on files that lie."""

import collections
import io
import json
import pickle
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bin_to_safetensors import drop_tied
from build_fp16 import as_float, to_float16, whole_elements
from checkpoint import safetensors_file, shards, torch_zip
from checkpoint.tensor import CHUNK, Tensor, row_major
from common.program import UserError
from conftest import REPO


@pytest.fixture(scope="module")
def samples(torch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """.bin files made by torch, with the official writer's .safetensors beside them."""
    folder = tmp_path_factory.mktemp("samples")
    subprocess.run([torch_python, REPO / "tests/make_checkpoints.py", folder], check=True)
    return folder


@pytest.mark.parametrize("name", ["dtypes", "views", "parameters"])
def test_bin_becomes_what_the_official_writer_makes(samples: Path, tmp_path: Path, name: str) -> None:
    safetensors_file.write(tmp_path / "out", torch_zip.read(samples / f"{name}.bin").values())
    assert (tmp_path / "out").read_bytes() == (samples / f"{name}.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["dtypes", "views", "parameters"])
def test_safetensors_are_read_and_written_unchanged(samples: Path, tmp_path: Path, name: str) -> None:
    path = samples / f"{name}.safetensors"
    safetensors_file.write(tmp_path / "out", safetensors_file.read(path).values())
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


LOAD = """
import sys, torch
from safetensors.torch import load_file
ours = torch.load(sys.argv[1], weights_only=True, mmap=True)
official = load_file(sys.argv[2])
assert list(ours) and set(ours) == set(official)
for name, tensor in official.items():
    assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (ours[name], tensor))
    assert one.equal(other), name
    assert tensor.numel() == 0 or ours[name].data_ptr() % 64 == 0, name
"""


@pytest.mark.parametrize("name", ["dtypes", "views", "parameters"])
def test_torch_loads_the_bin_we_write(
    samples: Path, tmp_path: Path, name: str, call: Callable, torch_python: Path
) -> None:
    official = samples / f"{name}.safetensors"
    torch_zip.write(tmp_path / "x.bin", safetensors_file.read(official).values())
    result = call(torch_python, "-c", LOAD, tmp_path / "x.bin", official)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(tmp_path / "x.bin") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("name", ["dtypes", "views", "parameters"])
def test_round_trips_are_byte_identical(samples: Path, tmp_path: Path, name: str) -> None:
    first, second, third = tmp_path / "1.safetensors", tmp_path / "2.bin", tmp_path / "3.safetensors"
    safetensors_file.write(first, torch_zip.read(samples / f"{name}.bin").values())
    torch_zip.write(second, safetensors_file.read(first).values())
    safetensors_file.write(third, torch_zip.read(second).values())
    assert first.read_bytes() == third.read_bytes()
    torch_zip.write(tmp_path / "4.bin", safetensors_file.read(third).values())
    assert second.read_bytes() == (tmp_path / "4.bin").read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("legacy", "not a whole zip file"),
        ("training", "entry 'optimizer' is no tensor"),
        ("module", "asks for torch.nn.modules.linear.Linear"),
    ],
)
def test_what_is_no_bare_state_dict_is_refused(samples: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        torch_zip.read(samples / f"{name}.bin")


def test_a_truncated_bin_is_refused(samples: Path, tmp_path: Path) -> None:
    whole = (samples / "dtypes.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut\.bin: not a whole zip file"):
        torch_zip.read(tmp_path / "cut.bin")


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


def test_a_pickle_that_calls_something_is_refused_unrun(tmp_path: Path) -> None:
    path = zip_with(tmp_path / "evil.bin", pickle.dumps({"weight": Evil(tmp_path / "ran")}))
    with pytest.raises(UserError, match=r"asks for (io|_io)\.open"):
        torch_zip.read(path)
    assert not (tmp_path / "ran").exists()


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


def test_a_hand_made_bin_reads(tmp_path: Path) -> None:
    storage = np.arange(4, dtype="<f4").tobytes()
    path = zip_with(tmp_path / "good.bin", tensor_pickle(1, (3,), (1,)), storage)
    tensor = torch_zip.read(path)["weight"]
    assert b"".join(bytes(chunk) for chunk in tensor.chunks()) == storage[4:]


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "message"),
    [
        (1, (4,), (1,), "reaches beyond its storage"),
        (0, (2, 2), (3, 1), "reaches beyond its storage"),
        (0, (2**62,), (2**62,), "repeats its storage"),
        (0, (-1,), (1,), "impossible shape"),
        (-1, (2,), (1,), "impossible shape"),
        (0, (2,), (1, 1), "impossible shape"),
        (0, ("2",), (1,), "impossible shape"),
    ],
)
def test_views_that_lie_are_refused(tmp_path: Path, offset: int, shape: tuple, stride: tuple, message: str) -> None:
    path = zip_with(tmp_path / "lie.bin", tensor_pickle(offset, shape, stride))
    with pytest.raises(UserError, match=message):
        torch_zip.read(path)


def test_compressed_storages_are_refused(tmp_path: Path) -> None:
    path = zip_with(tmp_path / "small.bin", tensor_pickle(0, (4,), (1,)), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="compressed or encrypted"):
        torch_zip.read(path)


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.PROTO + b"\x02" + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 100_000 + pickle.STOP,
        pickle.PROTO + b"\x02" + pickle.EMPTY_LIST * 5 + pickle.APPEND * 10 + pickle.STOP,
        pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + struct.pack("<Q", 2**40) + pickle.STOP,
        pickle.PROTO
        + b"\x02"
        + pickle.GLOBAL
        + b"torch\nHalfStorage\n"
        + pickle.EMPTY_DICT
        + pickle.BUILD
        + pickle.STOP,
        pickle.PROTO + b"\x02" + pickle.LONG_BINGET + b"\xff\xff\xff\xff" + pickle.STOP,
        pickle.PROTO + b"\x02" + pickle.BINUNICODE + b"\xff\xff\xff\xff" + b"short",
        b"",
    ],
    ids=["deep tuples", "empty stack", "huge bytearray", "build a type", "memo", "long text", "empty"],
)
def test_pickles_that_would_crash_or_fill_memory_are_one_line(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(UserError, match=r"its data\.pkl is damaged"):
        torch_zip.read(zip_with(tmp_path / "x.bin", pickled))


def test_deep_lists_end_in_one_line(tmp_path: Path) -> None:
    nested = pickle.PROTO + b"\x02" + pickle.EMPTY_LIST * 100_000 + pickle.APPEND * 99_999 + pickle.STOP
    with pytest.raises(UserError, match="holds a list, not a state_dict"):
        torch_zip.read(zip_with(tmp_path / "x.bin", nested))


def test_the_attributes_of_a_state_dict_are_dropped(tmp_path: Path) -> None:
    state = collections.OrderedDict()
    state._metadata = collections.OrderedDict(version=1)  # what torch.nn.Module.state_dict adds
    assert torch_zip.read(zip_with(tmp_path / "x.bin", pickle.dumps(state, protocol=2))) == {}


def test_a_view_that_repeats_a_few_bytes_into_terabytes_is_refused(tmp_path: Path) -> None:
    path = zip_with(tmp_path / "x.bin", tensor_pickle(0, (2**40,), (0,)))
    with pytest.raises(UserError, match="repeats its storage more than 64 times"):
        torch_zip.read(path)


def test_a_compressed_pickle_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    with pytest.raises(UserError, match="compressed or encrypted"):
        torch_zip.read(tmp_path / "x.bin")


def test_deeply_nested_headers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its header is damaged"):
        safetensors_file.read(safetensors_with(tmp_path / "x.safetensors", b"[" * 100_000))


def test_large_transposed_tensors_come_in_small_pieces(tmp_path: Path) -> None:
    rows, columns = 3, 300_000
    values = np.arange(rows * columns, dtype="<f4").reshape(rows, columns)
    (tmp_path / "w").write_bytes(values.tobytes())
    tensor = Tensor("w", "F32", (columns, 1, rows), (1, 1, columns), tmp_path / "w", 0)
    pieces = [bytes(piece) for piece in tensor.chunks()]
    assert max(map(len, pieces)) <= CHUNK
    assert b"".join(pieces) == values.T.tobytes()


def safetensors_with(path: Path, header: bytes, data: bytes = bytes(8)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} ', None),
        (b"{", "its header is damaged"),
        (b"[]", "its header is damaged"),
        (b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}', "dtype 'F99'"),
        (b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', "its header is damaged"),
        (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "its header is damaged"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "is 70 bytes where its header tells of 66"),
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


def stored(path: Path, data: bytes, dtype: str, numel: int) -> Tensor:
    path.write_bytes(data)
    return Tensor("w", dtype, (numel,), row_major((numel,)), path, 0)


def test_bfloat16_bytes_by_hand(tmp_path: Path) -> None:
    # 0x3F80 is 1.0 and 0xC040 is -3.0 in bfloat16: the upper halves of the float32 patterns
    assert as_float(struct.pack("<HH", 0x3F80, 0xC040), "BF16").tolist() == [1.0, -3.0]
    tensor = stored(tmp_path / "w", struct.pack("<HH", 0x3F80, 0xC040), "BF16", 2)
    assert b"".join(bytes(chunk) for chunk in to_float16(tensor)) == np.array([1, -3], "<f2").tobytes()


def test_weights_beyond_float16_are_refused_by_name_and_infinities_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="w holds weights beyond 65,504"):
        list(to_float16(stored(tmp_path / "w", np.array([1, 1e6], "<f4").tobytes(), "F32", 2)))
    infinite = np.array([np.inf, 65504], "<f4")
    assert list(to_float16(stored(tmp_path / "w", infinite.tobytes(), "F32", 2)))


@given(st.lists(st.binary(max_size=9)), st.sampled_from([1, 2, 4, 8]))
def test_whole_elements_keep_every_byte_in_order(pieces: list[bytes], width: int) -> None:
    data = b"".join(pieces)
    whole = data[: len(data) - len(data) % width]
    result = list(whole_elements(iter(map(memoryview, pieces)), width))
    assert b"".join(result) == whole
    assert all(len(piece) % width == 0 for piece in result)


def test_program_converts_the_demo_and_carries_its_files(call: Callable, tmp_path: Path, tools_python: Path) -> None:
    result = call(tools_python, "scripts/bin_to_safetensors.py", "demo", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "quantmill.json", "model.safetensors.index.json"} <= names
    assert not any(name.endswith(".bin") for name in names)
    found = shards.find(tmp_path / "out").tensors()
    original = shards.find(REPO / "demo").tensors()
    assert set(found) == set(original)
    assert all(
        b"".join(map(bytes, found[name].chunks())) == b"".join(map(bytes, original[name].chunks())) for name in found
    )


def tiny_model(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> Path:
    """A folder with config.json and a model.safetensors of float32 tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | config))
    header, data = {}, b""
    for name, value in tensors.items():
        raw = value.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    safetensors_with(folder / "model.safetensors", json.dumps(header).encode(), data)
    return folder


def test_drop_tied_heads() -> None:
    def tensor(name: str, start: int) -> Tensor:
        return Tensor(name, "F32", (1,), (1,), Path("x"), start)

    embeddings, head = tensor("model.embed_tokens.weight", 0), tensor("lm_head.weight", 0)
    both = {embeddings.name: embeddings, head.name: head}
    assert list(drop_tied({"tie_word_embeddings": True}, both)) == ["model.embed_tokens.weight"]
    assert drop_tied({"tie_word_embeddings": False}, both) == both
    with pytest.raises(UserError, match=r"no lm_head\.weight"):
        untied = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
        drop_tied(untied, {embeddings.name: embeddings})
    assert drop_tied({"architectures": ["GemmaForCausalLM"]}, {embeddings.name: embeddings})


def test_heads_that_differ_though_config_ties_them_are_refused(tmp_path: Path) -> None:
    values = {"model.embed_tokens.weight": np.ones((2, 2)), "lm_head.weight": np.zeros((2, 2))}
    source = shards.find(tiny_model(tmp_path / "m", values, tie_word_embeddings=True))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the embeddings"):
        drop_tied(source.config(), source.tensors())
