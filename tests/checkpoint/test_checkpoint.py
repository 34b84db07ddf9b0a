"""Checkpoint readers and writers against torch's and safetensors' own, and on files that lie."""

import json
import math
import struct
import subprocess
import zipfile
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO
from forge import safetensors_with
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_tensor import write_tensor

from quantmill.checkpoint import safetensors_file, sharding, shards, torch_zip
from quantmill.checkpoint.conversion import compare, drop_tied
from quantmill.checkpoint.copying import equal_bytes
from quantmill.checkpoint.tensor import CHUNK, Tensor
from quantmill.common.program import UserError


@pytest.fixture(scope="module")
def samples(torch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """.bin files made by torch, with the official writer's .safetensors next to them."""
    folder = tmp_path_factory.mktemp("samples")
    subprocess.run([torch_python, REPO / "tests/checkpoint/make_checkpoints.py", folder], check=True)
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
        ("legacy", "a bare pickle, as torch.save wrote before 1.6"),
        ("training", "entry 'optimizer' is not a tensor"),
        ("module", "asks for torch.nn.modules.linear.Linear"),
        ("conjugated", "a conjugated or negated view"),
        ("negated", "a conjugated or negated view"),
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


def test_large_transposed_tensors_come_in_small_pieces(tmp_path: Path) -> None:
    rows, columns = 3, 300_000
    values = np.arange(rows * columns, dtype="<f4").reshape(rows, columns)
    (tmp_path / "w").write_bytes(values.tobytes())
    tensor = Tensor("w", "F32", (columns, 1, rows), (1, 1, columns), tmp_path / "w", 0)
    pieces = [bytes(piece) for piece in tensor.chunks()]
    assert max(map(len, pieces)) <= CHUNK
    assert b"".join(pieces) == values.T.tobytes()


def test_program_converts_the_demo_and_carries_its_files(run_program: Callable, tmp_path: Path) -> None:
    result = run_program("checkpoint.to_safetensors", "demo", tmp_path / "out")
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


def test_programs_convert_there_and_back(run_program: Callable, tmp_path: Path) -> None:
    for program, source, target in (
        ("checkpoint.to_safetensors", REPO / "demo", tmp_path / "first"),
        ("checkpoint.to_bin", tmp_path / "first", tmp_path / "bin"),
        ("checkpoint.to_safetensors", tmp_path / "bin", tmp_path / "second"),
    ):
        result = run_program(program, source, target)
        assert result.returncode == 0, result.stderr
    files = sorted((tmp_path / "first").glob("*.safetensors*"))
    assert len(files) == 4
    assert all(file.read_bytes() == (tmp_path / "second" / file.name).read_bytes() for file in files)


def tiny_model(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> Path:
    """Write a folder with config.json and a model.safetensors of float32 tensors."""
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
    llama = {"architectures": ["LlamaForCausalLM"]}
    assert list(drop_tied(llama | {"tie_word_embeddings": True}, both)) == ["model.embed_tokens.weight"]
    own_class = llama | {"tie_word_embeddings": True, "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    assert drop_tied(own_class, both) == both
    assert drop_tied({"tie_word_embeddings": False}, both) == both
    with pytest.raises(UserError, match=r"no lm_head\.weight"):
        drop_tied(llama | {"tie_word_embeddings": False}, {embeddings.name: embeddings})
    assert drop_tied({"architectures": ["GemmaForCausalLM"]}, {embeddings.name: embeddings})


def test_tied_heads_that_differ_are_refused(tmp_path: Path) -> None:
    values = {"model.embed_tokens.weight": np.ones((2, 2)), "lm_head.weight": np.zeros((2, 2))}
    source = shards.find(tiny_model(tmp_path / "m", values, tie_word_embeddings=True))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the embeddings"):
        drop_tied(source.config(), source.tensors())


SILENT = """
import sys, transformers
model, info = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
"""


def test_transformers_loads_what_we_write_and_says_nothing(
    run_program: Callable, call: Callable, tmp_path: Path, torch_python: Path
) -> None:
    assert run_program("checkpoint.to_safetensors", REPO / "demo", tmp_path / "out").returncode == 0
    result = call(torch_python, "-W", "error", "-c", SILENT, tmp_path / "out", HF_HUB_DISABLE_PROGRESS_BARS="1")
    lines = [line for line in result.stderr.splitlines() if "Loading weights" not in line]  # its progress bar
    assert (result.returncode, lines) == (0, [])


@pytest.mark.parametrize("name", ["tied", "copied"])
def test_a_tied_head_is_dropped_wherever_it_lies(
    run_program: Callable, samples: Path, tmp_path: Path, name: str
) -> None:
    result = run_program("checkpoint.to_safetensors", samples / name, tmp_path / "out", "--verify")
    assert result.returncode == 0, result.stderr
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = shards.find(tmp_path / "out").tensors()
    rest = {"model.norm.weight"} if name == "tied" else {"x", "y"}  # x and y share a storage; both are kept
    assert set(index["weight_map"]) == set(found) == {"model.embed_tokens.weight"} | rest
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_resharding(run_program: Callable, tmp_path: Path) -> None:
    program, out = "checkpoint.to_safetensors", tmp_path / "out"
    result = run_program(program, REPO / "demo", out, "--verify", "--max-shard-size", "2MB")
    assert result.returncode == 0, result.stderr
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    assert len(sizes) > 5
    assert max(sizes) < 2.1e6
    result = run_program(program, out, tmp_path / "one", "--max-shard-size", "1GB")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "one/model.safetensors.index.json").exists()
    found, original = shards.find(tmp_path / "one").tensors(), shards.find(REPO / "demo").tensors()
    assert set(found) == set(original)
    assert all(equal_bytes(found[name], original[name]) for name in found)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 500 * 10**6), ("2GiB", 2**31), ("1.5KB", 1500), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert sharding.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "0.1", "9" * 400, "5 apples", "1e9"])
def test_texts_that_are_not_sizes(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not a size"):
        sharding.parse_size(text)


def test_a_byte_that_was_written_wrong_is_found(tmp_path: Path) -> None:
    tensor = write_tensor(tmp_path / "w", bytes(range(200)), "U8", 200)
    safetensors_file.write(tmp_path / "out", [tensor])
    compare([tensor], tmp_path / "out", "safetensors")
    data = bytearray((tmp_path / "out").read_bytes())
    data[-7] ^= 1
    (tmp_path / "out").write_bytes(data)
    with pytest.raises(OSError, match="w was not written as it was read"):
        compare([tensor], tmp_path / "out", "safetensors")


def test_nan_payloads_are_kept(tmp_path: Path) -> None:
    payloads = struct.pack("<4I", 0x7FC00001, 0xFFC12345, 0x7F800001, 0x7FFFFFFF)  # quiet and signalling NaNs
    safetensors_file.write(tmp_path / "1", [write_tensor(tmp_path / "w", payloads, "F32", 4)])
    torch_zip.write(tmp_path / "2", safetensors_file.read(tmp_path / "1").values())
    assert b"".join(map(bytes, torch_zip.read(tmp_path / "2")["w"].chunks())) == payloads


@given(st.data())
@settings(deadline=None)
def test_any_view_is_gathered_as_numpy_does(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dimensions = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(dimensions))))
    steps = [data.draw(st.integers(1, 3)) for _ in dimensions]
    values = np.arange(math.prod(dimensions), dtype="<f4").reshape(dimensions)
    view = values.transpose(order)[tuple(slice(None, None, step) for step in steps)]
    path = tmp_path_factory.mktemp("view") / "w"
    path.write_bytes(values.tobytes())
    tensor = Tensor("w", "F32", view.shape, tuple(stride // 4 for stride in view.strides), path, 0)
    assert b"".join(map(bytes, tensor.chunks())) == view.tobytes()


def test_a_snapshot_links_only_to_its_own_blobs(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b/snapshots/commit"
    tiny_model(tmp_path / "made", {"w": np.ones(2)})
    folder.mkdir(parents=True)
    for blobs in (tmp_path / "models--a--b/blobs", tmp_path / "blobs"):  # a repository's own, and all repositories'
        blobs.mkdir()
        (blobs / "1").write_bytes((tmp_path / "made/model.safetensors").read_bytes())
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / "model.safetensors").symlink_to(blobs / "1")
        assert list(shards.find(folder).tensors()) == ["w"]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "made/model.safetensors")
    with pytest.raises(UserError, match="link that leads out"):
        shards.find(folder)
