"""Hostile .bin files through the programs: nothing runs, memory stays small, and one line names file and remedy."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from forge import Evil, tensor_pickle, zip_with


def call(module: str, name: str, argument: str) -> bytes:
    """Return a pickle that calls module.name(argument)."""
    text = pickle.BINUNICODE + struct.pack("<I", len(argument)) + argument.encode()
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + text + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP


@pytest.mark.parametrize(
    ("module", "name", "argument"),
    [
        ("os", "system", "touch {}/ran"),
        ("io", "open", "{}/ran"),
        ("posix", "system", "touch {}/ran"),
        ("builtins", "eval", "open('{}/ran', 'w')"),
        ("builtins", "exec", "open('{}/ran', 'w')"),
        ("torch.serialization", "load", "{}/ran"),
        ("torch._utils", "_rebuild_wrapper_subclass", "{}/ran"),
        ("collections", "OrderedDict.fromkeys", "{}/ran"),
    ],
)
def test_calls(hostile_model: Path, tmp_path: Path, refusal: Callable, module: str, name: str, argument: str) -> None:
    zip_with(hostile_model / "pytorch_model.bin", call(module, name, argument.format(tmp_path)))
    assert f"asks for {module}.{name}" in refusal()


@pytest.mark.parametrize("evil", [False, True])
def test_pickles_without_a_zip(hostile_model: Path, tmp_path: Path, refusal: Callable, evil: bool) -> None:
    content = Evil(tmp_path / "ran") if evil else {"weight": [1.0]}
    (hostile_model / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    assert "a bare pickle" in refusal()


def colliding_key(number: int) -> bytes:
    """Return the item {number * (2**61 - 1): None}; all such numbers have the hash 0."""
    return pickle.LONG1 + b"\x10" + (number * (2**61 - 1)).to_bytes(16, "little") + pickle.NONE


MARK, DICT, LIST = pickle.MARK, pickle.EMPTY_DICT, pickle.EMPTY_LIST
PICKLES = {  # with what is said of them
    "memo bomb": (
        b"\x80\x02" + DICT + b"".join(b"r" + struct.pack("<I", i << 20) for i in range(4096)) + b".",
        "holds no tensors",
    ),
    "a million dicts": (b"\x80\x02" + LIST + MARK + DICT * 5_000_000 + pickle.APPENDS + b".", "longer than that of"),
    "a million marks": (b"\x80\x02" + MARK * 5_000_000 + b".", "longer than that of"),
    "a million memos": (b"\x80\x04" + DICT + pickle.MEMOIZE * 5_000_000 + b".", "longer than that of"),
    "a long text": (b"\x80\x02X" + struct.pack("<I", 2**31) + b"x" * 7_000_000 + b".", "is damaged (EOFError)"),
    "a pickle that is too long": (b"\x80\x02" + b"N" * 9_000_000 + b".", "is over 8 MiB"),
    "letters for a shape": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuK\x04tQK\x00X" + struct.pack("<I", 7_000_000) + b"x" * 7_000_000 + b")\x89}tR.",
        "not a tensor",
    ),
    "a long tuple, again and again": (
        b"\x80\x02](" + b"N" * 400_000 + b"tq\x00a" + b"h\x00\x85a" * 2000 + b".",
        "a tuple that is too long",
    ),
    "a tensor at the end of the world": (tensor_pickle(2**62, (1,), (1,)), "reaches beyond its storage"),
    "one that overlaps itself": (tensor_pickle(0, (2, 2, 2), (1, 1, 1)), "overlaps itself"),
    "copies of a dict": (
        b"\x80\x02}q\x00(" + b"".join(b"X\x04\x00\x00\x00%04dN" % i for i in range(9999)) + b"u"
        b"ccollections\nOrderedDict\nq\x01" + b"h\x01h\x00\x85R" * 100_000 + b".",
        "is damaged (TypeError)",
    ),
    "keys that collide": (
        b"\x80\x02}(" + b"".join(map(colliding_key, range(50_000))) + b"u.",
        "a key that is not a text",
    ),
    "a name that moves the cursor": (b"\x80\x02}X\x04\x00\x00\x00\x1b[2JNs.", "is not a tensor"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_fill_memory_or_never_end(hostile_model: Path, refusal: Callable, name: str) -> None:
    content, reason = PICKLES[name]
    zip_with(hostile_model / "pytorch_model.bin", content)
    assert reason in refusal()


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


def test_members_that_overlap(hostile_model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD)
    entry = directory_entry(data, 0)
    size = struct.unpack_from("<I", data, entry + 20)[0] + 8
    struct.pack_into("<II", data, entry + 20, size, size)
    (hostile_model / "pytorch_model.bin").write_bytes(data)
    assert "reaches into what follows it" in refusal()


def test_two_members_in_one_place(hostile_model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD, ("archive/data/1", bytes(16)))
    struct.pack_into(
        "<I", data, directory_entry(data, 2) + 42, struct.unpack_from("<I", data, directory_entry(data, 1) + 42)[0]
    )
    (hostile_model / "pytorch_model.bin").write_bytes(data)
    assert "reaches into what follows it" in refusal()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name(hostile_model: Path, refusal: Callable) -> None:
    (hostile_model / "pytorch_model.bin").write_bytes(zip_of(*GOOD, GOOD[1]))
    assert "two members are called archive/data/0" in refusal()


def test_encrypted_members(hostile_model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD)
    data[directory_entry(data, 1) + 8] |= 1
    (hostile_model / "pytorch_model.bin").write_bytes(data)
    assert "compressed or encrypted" in refusal()


def test_a_zip_bomb(hostile_model: Path, refusal: Callable) -> None:
    zip_with(hostile_model / "pytorch_model.bin", GOOD[0][1], bytes(300_000_000), zipfile.ZIP_DEFLATED)
    assert "compressed or encrypted" in refusal()


def test_a_directory_of_millions(hostile_model: Path, refusal: Callable) -> None:
    entry = b"PK\x01\x02" + bytes(42)
    count = 10_000_000 // len(entry)
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, count * len(entry), 0, 0)
    (hostile_model / "pytorch_model.bin").write_bytes(entry * count + end)
    assert "not a whole zip file" in refusal()


def test_a_directory_of_many_empty_members(hostile_model: Path, refusal: Callable) -> None:
    (hostile_model / "pytorch_model.bin").write_bytes(zip_of(*((f"{number}", b"") for number in range(60_000))))
    assert "without data.pkl" in refusal()


def test_two_checkpoints_in_one_file(hostile_model: Path, refusal: Callable) -> None:
    (hostile_model / "pytorch_model.bin").write_bytes(zip_of(*GOOD, ("other/data.pkl", GOOD[0][1])))
    assert "holds two data.pkl" in refusal()


def test_a_member_beyond_the_file(hostile_model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD)
    struct.pack_into("<I", data, directory_entry(data, 1) + 42, 2**31)
    (hostile_model / "pytorch_model.bin").write_bytes(data)
    assert "is not where the zip's directory says" in refusal()


def test_damaged_bytes_of_a_tensor(hostile_model: Path, refusal: Callable) -> None:
    data = zip_of(*GOOD)
    data[data.index(b"archive/data/0") + len("archive/data/0")] ^= 1
    (hostile_model / "pytorch_model.bin").write_bytes(data)
    assert "their CRC is wrong" in refusal()


def test_a_pointer_instead_of_the_file(hostile_model: Path, refusal: Callable) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"
    for name in ("pytorch_model.bin", "model.safetensors"):
        (hostile_model / name).write_bytes(pointer)
        assert "git lfs pull" in refusal()
