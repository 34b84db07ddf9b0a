"""GGUF files that lie: one line names the file and the remedy, memory stays small, and nothing is executed."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MEMORY
from forge import gguf_array, gguf_key, gguf_part, gguf_tensor, gguf_text, gguf_texts, gguf_with

from quantmill.checkpoint import gguf_file
from quantmill.common.program import UserError

pack = struct.pack
TEXT, ARRAY = 8, 9
F32, Q4_K = 0, 12
ONE = gguf_tensor("a", (8,), F32)
DATA = bytes(32)


def alignment(value: int) -> dict:
    return {"keys": (gguf_key("general.alignment", 4, pack("<I", value)),), "tensors": (ONE,), "data": DATA}


def tensor(*arguments: object) -> dict:
    return {"tensors": (gguf_tensor(*arguments),), "data": DATA}


def key(*arguments: object) -> dict:
    return {"keys": (gguf_key(*arguments),)}


NESTED = pack("<IQIQ", ARRAY, 1, 0, 0)
HOSTILE = {
    "another file": ({"start": b"GGML\3\0\0\0"}, "is not a GGUF file: it begins with b'GGML'"),
    "a zip": ({"start": b"PK\3\4\3\0\0\0"}, "is not a GGUF file"),
    "a pointer": ({"start": b"version https://git-lfs"}, "only git-lfs's pointer to the file; run `git lfs pull`"),
    "big-endian": ({"start": b"GGUF\0\0\0\3"}, "is big-endian; take the little-endian file"),
    "version 0": ({"start": b"GGUF\0\0\0\0"}, "is big-endian"),
    "version 1": ({"start": b"GGUF\1\0\0\0"}, "is GGUF version 1, and 2 and 3 are known; convert the model again"),
    "version 4": ({"start": b"GGUF\4\0\0\0"}, "is GGUF version 4"),
    "huge numbers of tensors": ({"counts": (2**64 - 1, 0)}, "claims 18446744073709551615 tensors, more than it can"),
    "negative numbers of keys": ({"counts": (0, 2**63)}, "claims 9223372036854775808 keys, more than it can hold"),
    "more keys than bytes": ({"data": bytes(1000), "counts": (0, 74)}, "claims 74 keys, more than it can hold"),
    "more keys than a model": ({"data": bytes(2**20), "counts": (0, 2**16 + 1)}, "claims 65537 keys, more than it"),
    "more tensors than a model": ({"data": bytes(2**21), "counts": (2**16 + 1, 0)}, "claims 65537 tensors, more"),
    "a key of 4 GB": ({"keys": (pack("<Q", 2**32),), "data": bytes(64)}, "the name of a key is 4294967296 bytes long"),
    "a key too long": (key("k" * 2**16, 0, b"\0"), "the name of a key is 65536 bytes long, and 65535 are the most"),
    "a text of 4 GB": (key("a", TEXT, pack("<Q", 2**32)), "a is 4294967296 bytes long, and 1048576 are the most"),
    "a text beyond the file": (key("a", TEXT, pack("<Q", 1000)), "is cut off: it has 64 bytes, and its header needs"),
    "an empty key": (key("", 0, b"\0"), "a key is called ''; refused"),
    "a key with a NUL": (key("general.alignment\0", 4, DATA[:4]), r"a key is called 'general.alignment\x00'; refused"),
    "a key that moves the cursor": (key("\x1b[2J", 0, b"\0"), r"a key is called '\x1b[2J'; refused"),
    "a key that is not UTF-8": (key(b"\xff", 0, b"\0"), "the name of a key is not UTF-8; download it again"),
    "a text that is not UTF-8": (key("a", TEXT, gguf_text(b"\xc3")), "a is not UTF-8"),
    "a token that is not UTF-8": ({"keys": (gguf_texts("a", "b", b"\xed\xa0\x80"),)}, "a[1] is not UTF-8"),
    "a key twice": ({"keys": (gguf_key("a", 0, b"\1"),) * 2}, "the key a occurs twice; only one of them can be right"),
    "a type that is none": (key("a", 13, DATA), "a is of the unknown type 13; refused"),
    "an array of a type that is none": (key("a", ARRAY, pack("<IQ", 99, 1)), "a is an array of the unknown type 99"),
    "an array of arrays": (key("a", ARRAY, NESTED), "a is an array of arrays, which llama.cpp does not read; refused"),
    "an array longer than the file": (key("a", ARRAY, pack("<IQ", 12, 2**61)), "is cut off: it has 64 bytes"),
    "texts longer than the file": (key("a", ARRAY, pack("<IQ", TEXT, 2**61)), "is cut off: it has 64 bytes"),
    "a truth value of 2": (key("a", 7, b"\2"), "a is a boolean that is neither 0 nor 1"),
    "truth values of 2": ({"keys": (gguf_array("a", 7, b"\1\2"[:1], b"\2"),)}, "a is a boolean that is neither 0"),
    "a chat template of 2 MB": (
        key("tokenizer.chat_template.x", TEXT, gguf_text("{{" * 2**20)),
        "tokenizer.chat_template.x is 2097152 bytes long, and 1048576 are the most; refused",
    ),
    "an alignment of 0": (alignment(0), "its general.alignment is 0, which is not a power of two; refused"),
    "an alignment of 3": (alignment(3), "its general.alignment is 3, which is not a power of two; refused"),
    "an alignment beyond the file": (alignment(2**31), "bytes where its header claims 2147483680; download it again"),
    "a text as alignment": (key("general.alignment", TEXT, gguf_text("32")), "the type of general.alignment is 8"),
    "a part that is a text": (key("split.no", TEXT, gguf_text("0")), "the type of split.no is 8, and has to be 2"),
    "a list as architecture": (key("general.architecture", ARRAY, NESTED), "the type of general.architecture is"),
    "a name of 64 bytes": (tensor("n" * 64, (8,), F32), "the name of a tensor is 64 bytes long, and 63 are the most"),
    "a tensor with a NUL": (tensor("a\0b", (8,), F32), r"a tensor is called 'a\x00b'; refused"),
    "tensor twice": ({"tensors": (ONE, ONE), "data": bytes(64)}, "the tensor a occurs twice; only one of them can be"),
    "five dimensions": (tensor("a", (1,) * 5, F32), "a has 5 dimensions, and ggml's tensors up to 4; refused"),
    "billions of dimensions": (
        {"tensors": (gguf_text("a") + pack("<I", 2**32 - 1),), "data": DATA},
        "a has 4294967295 dimensions",
    ),
    "a dimension below 0": (tensor("a", (2**64 - 8,), F32), "a has impossible dimensions [18446744073709551608]"),
    "sizes that overflow": (tensor("a", (2**32, 2**31), F32), "a has impossible dimensions [2147483648, 4294967296]"),
    "sizes that overflow except for a 0": (tensor("a", (0, 2**32, 2**31), F32), "a has impossible dimensions"),
    "bytes that overflow": (tensor("a", (2**62,), F32), "bytes where its header claims 18446744073709551680"),
    "rows of half blocks": (tensor("a", (128, 2), Q4_K), "a is Q4_K and has rows of 128, no multiple of 256; refused"),
    "a number that is not a block": (tensor("a", (), Q4_K), "a is Q4_K and has rows of 1, no multiple of 256"),
    "a type that was one once": (tensor("a", (32,), 31), "a is of type 31, which ggml does not have (any"),
    "a type beyond all": (tensor("a", (32,), 2**32 - 1), "a is of type 4294967295, which ggml does not have"),
    "tensors that overlap": (
        {"tensors": (ONE, gguf_tensor("b", (8,), F32)), "data": bytes(64)},
        "b begins at byte 0 of the tensors, not at 32 behind the last one: they overlap, leave a gap or are not",
    ),
    "a gap": ({"tensors": (ONE, gguf_tensor("b", (8,), F32, 64)), "data": bytes(96)}, "b begins at byte 64 of the"),
    "a tensor out of line": ({"tensors": (gguf_tensor("a", (8,), F32, 4),), "data": bytes(64)}, "a begins at byte 4"),
    "a tensor beyond the file": (tensor("a", (8,), F32, 2**63), "a begins at byte 9223372036854775808"),
    "a file that is cut off": ({"tensors": (ONE,), "data": DATA[:-1]}, "has 95 bytes where its header claims 96"),
    "a file with something behind": ({"tensors": (ONE,), "data": bytes(33)}, "has 97 bytes where its header claims 96"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_files_that_lie(tmp_path: Path, case: str) -> None:
    words, message = HOSTILE[case]
    path = gguf_with(tmp_path / "x.gguf", **words)
    with pytest.raises(UserError) as caught:
        gguf_file.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_file_cut_off_anywhere(tmp_path: Path) -> None:
    keys = gguf_key("a", 4, DATA[:4]), gguf_texts("tokens", "a", "b"), gguf_array("scores", 6, DATA[:4], DATA[:4])
    whole = gguf_with(tmp_path / "x", keys, (ONE, gguf_tensor("b", (8,), F32, 32)), bytes(64)).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:size])
        with pytest.raises(UserError, match="download it again"):
            gguf_file.read(tmp_path / "x")


MODEL = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 1}
FILL = {  # what takes the most memory for its bytes, in a header that is as long as one may be
    "empty texts": lambda: gguf_array("a", TEXT, bytes(8) * (2**23 - 100), count=2**23 - 100),
    "short texts": lambda: gguf_array("a", TEXT, gguf_text("ab") * 6_700_000, count=6_700_000),
    "numbers": lambda: gguf_array("a", 12, bytes(8) * (2**23 - 100), count=2**23 - 100),
    "truth values": lambda: gguf_array("a", 7, bytes(2**26 - 100), count=2**26 - 100),
    "long texts": lambda: gguf_array("a", TEXT, gguf_text("🦙" + "x" * (2**20 - 4)) * 63, count=63),
    "keys": lambda: b"".join(gguf_key(f"{number:01000}", 0, b"\0") for number in range(2**16)),
}


@pytest.fixture
def refusal(tmp_path: Path, run_program: Callable) -> Callable[[Path], str]:
    """Have the program take a prebuilt file; its one line, after which nothing is there and little memory was held."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (model / "model.safetensors").write_bytes(pack("<Q", len(header)) + header + b"\0")

    def run(path: Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        words = "--layout", "gguf", "--format", "theirs", "--engine", "llama_cpp"
        result = run_program("fetch.prebuilt", path, tmp_path / "out", "--model", model, *words)
        assert result.returncode == 1, result
        assert sorted(tmp_path.rglob("*")) == before
        assert result.memory < MEMORY
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: {path}: ")
        return line

    return run


@pytest.mark.long
@pytest.mark.parametrize("case", FILL)
def test_headers_that_fill_memory(tmp_path: Path, refusal: Callable[[Path], str], case: str) -> None:
    """They are read, and then refused as another model."""
    count = 2**16 if case == "keys" else 1
    path = gguf_with(tmp_path / "x.gguf", (FILL[case](),), counts=(0, count))
    assert "is another model: its general.architecture is None, this model's llama" in refusal(path)


def test_tensors_that_fill_memory(tmp_path: Path, refusal: Callable[[Path], str]) -> None:
    tensors = b"".join(gguf_tensor(f"{number:063}", (0, 1, 1, 1), F32) for number in range(2**16))
    path = gguf_with(tmp_path / "x.gguf", (), (tensors,), counts=(2**16, 0))
    assert "is another model" in refusal(path)


def test_a_header_longer_than_any(tmp_path: Path, refusal: Callable[[Path], str]) -> None:
    keys = tuple(gguf_array(name, 0, bytes(40_000_000), count=40_000_000) for name in "ab")
    assert "its metadata goes beyond 64 MiB, which no model's does; refused" in refusal(
        gguf_with(tmp_path / "x.gguf", keys)
    )


@pytest.mark.parametrize("case", ["a text of 4 GB", "huge numbers of tensors", "an array of arrays"])
def test_the_program_says_it_in_one_line(tmp_path: Path, refusal: Callable[[Path], str], case: str) -> None:
    words, message = HOSTILE[case]
    assert message in refusal(gguf_with(tmp_path / "x.gguf", **words))


def test_a_chat_template_is_not_rendered(tmp_path: Path, refusal: Callable[[Path], str]) -> None:
    """This one would write a file, and never end."""
    bomb = "{% for a in range(10**9) %}{% for b in range(10**9) %}{{ cycler.__init__.__globals__.os.mkdir('ran') }}"
    path = gguf_with(tmp_path / "x.gguf", (gguf_key("tokenizer.chat_template", TEXT, gguf_text(bomb)),))
    assert gguf_file.read(path).metadata["tokenizer.chat_template"] == bomb
    assert "is another model" in refusal(path)


SPLITS = {
    "a part that is missing": (
        lambda folder: gguf_part(folder, 0, 2, "a"),
        "m-00002-of-00002.gguf: is missing, one of 2 files; download it",
    ),
    "a part twice": (
        lambda folder: [gguf_part(folder, 0, 2, "a"), gguf_part(folder, 0, 2, "b", name="m-00002-of-00002.gguf")],
        "m-00002-of-00002.gguf: is part 2 of 2 by its name and 1 of 2 by its metadata; rename it",
    ),
    "a whole that is called a part": (
        lambda folder: [gguf_with(folder / f"m-0000{number}-of-00002.gguf", (), (ONE,), DATA) for number in (1, 2)],
        "m-00001-of-00002.gguf: is part 1 of 2 by its name and 1 of 1 by its metadata; rename it",
    ),
    "a part that is called a whole": (
        lambda folder: gguf_part(folder, 0, 2, "a", name="m.gguf"),
        "m.gguf: is part 1 of 1 by its name and 1 of 2 by its metadata; rename it",
    ),
    "a tensor in two parts": (
        lambda folder: [gguf_part(folder, 0, 2, "a"), gguf_part(folder, 1, 2, "a")],
        "m-00002-of-00002.gguf: a is also in m-00001-of-00002.gguf; only one of them can be right",
    ),
    "another number of tensors": (
        lambda folder: [gguf_part(folder, 0, 2, "a", tensors=9), gguf_part(folder, 1, 2, "b")],
        "m-00001-of-00002.gguf: its files hold 2 tensors, and the first claims 9; download them",
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_parts_that_are_not_of_one_model(tmp_path: Path, case: str) -> None:
    make, message = SPLITS[case]
    make(tmp_path)
    with pytest.raises(UserError) as caught:
        gguf_file.read_all(min(tmp_path.iterdir()))
    assert str(caught.value) == f"{tmp_path}/{message}"
