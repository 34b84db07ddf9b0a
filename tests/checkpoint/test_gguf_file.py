"""GGUF files that are what they say: what is read is what was written, and types have the bytes that are known."""

import struct
from pathlib import Path

import numpy as np
import pytest
from forge import gguf_array, gguf_key, gguf_part, gguf_tensor, gguf_text, gguf_texts, gguf_with

from quantmill.checkpoint import gguf_file, gguf_header, gguf_names
from quantmill.common.program import UserError

pack = struct.pack
TEXT = 8
# llama.cpp's documentation: bits for a weight, including the rest of a block
BITS = """
F32 32, F16 16, BF16 16, F64 64, I8 8, I16 16, I32 32, I64 64, Q4_0 4.5, Q4_1 5, Q5_0 5.5, Q5_1 6, Q8_0 8.5, Q8_1 9,
Q2_K 2.625, Q3_K 3.4375, Q4_K 4.5, Q5_K 5.5, Q6_K 6.5625, Q8_K 9.125, IQ1_S 1.5625, IQ1_M 1.75, IQ2_XXS 2.0625,
IQ2_XS 2.3125, IQ2_S 2.5625, IQ3_XXS 3.0625, IQ3_S 3.4375, IQ4_NL 4.5, IQ4_XS 4.25, TQ1_0 1.6875, TQ2_0 2.0625,
MXFP4 4.25, NVFP4 4.5, Q1_0 1.125, Q2_0 2.25
"""
BITS = {name: float(bits) for name, bits in (entry.split() for entry in BITS.split(","))}
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
VALUES = {0: 255, 1: -128, 2: 65535, 3: -32768, 4: 2**32 - 1, 5: -(2**31), 6: 0.5, 7: True, 10: 2**64 - 1, 11: -(2**63)}
VALUES[12] = 1e300


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type(tmp_path: Path, version: int) -> None:
    keys = [gguf_key(f"one.{kind}", kind, pack(f"<{NUMBERS[kind]}", value)) for kind, value in VALUES.items()]
    keys += [gguf_array(f"many.{kind}", kind, *[pack(f"<{NUMBERS[kind]}", VALUES[kind])] * 3) for kind in NUMBERS]
    keys += [gguf_array(f"none.{kind}", kind) for kind in (*NUMBERS, TEXT)]
    keys += [gguf_key("text", TEXT, gguf_text("Zürich 🦙")), gguf_texts("texts", "a", "", "▁é", "d")]
    start = b"GGUF" + pack("<I", version)
    found = gguf_file.read(gguf_with(tmp_path / "x", tuple(keys), start=start))
    assert (found.version, found.alignment, found.tensors) == (version, 32, {})
    for kind, value in VALUES.items():
        assert found.metadata[f"one.{kind}"] == value
        assert type(found.metadata[f"one.{kind}"]) is type(value)
        assert found.metadata[f"many.{kind}"].tolist() == [value] * 3
    assert {len(found.metadata[f"none.{kind}"]) for kind in (*NUMBERS, TEXT)} == {0}
    assert found.metadata["text"] == "Zürich 🦙"
    listed = found.metadata["texts"]
    assert (list(listed), listed[-1], listed[1:3], len(listed)) == (["a", "", "▁é", "d"], "d", ["", "▁é"], 4)


@pytest.mark.parametrize("name", BITS)
def test_bytes_of_every_type(tmp_path: Path, name: str) -> None:
    kind = next(number for number, known in gguf_file.TYPES.items() if known.name == name)
    nbytes = int(512 * 3 * BITS[name] / 8)
    data = bytes(nbytes) + bytes(-nbytes % 64)
    tensors = gguf_tensor("a", (512, 3), kind), gguf_tensor("b", (2,), 0, len(data))
    keys = (gguf_key("general.alignment", 4, pack("<I", 64)),)
    found = gguf_file.read(gguf_with(tmp_path / "x", keys, tensors, data + bytes(8), alignment=64)).tensors
    assert (found["a"].shape, found["a"].type, found["a"].nbytes) == ((3, 512), name, nbytes)
    assert found["b"].offset == found["a"].offset + len(data)
    assert found["a"].offset % 64 == 0


def test_every_type_has_a_known_answer() -> None:
    assert {known.name for known in gguf_file.TYPES.values()} == set(BITS)


def test_where_tensors_lie(tmp_path: Path) -> None:
    """Padding after the last tensor may be there or not; a tensor may be empty, or a number without dimensions."""
    weights = np.arange(12, dtype="<f4")
    tensors = (
        *(gguf_tensor("a.weight", (4, 3), 0), gguf_tensor("empty", (0, 3), 0, 64)),
        *(gguf_tensor("number", (), 0, 64), gguf_tensor("cube", (2, 1, 1, 1), 1, 96)),
    )
    data = weights.tobytes() + bytes(16) + pack("<f", 7.0) + bytes(28) + bytes(4)
    shapes = {"a.weight": (3, 4), "empty": (3, 0), "number": (), "cube": (1, 1, 1, 2)}
    for padding in (0, 28):
        path = gguf_with(tmp_path / "x", (), tensors, data + bytes(padding))
        found = gguf_file.read(path)
        assert found.data_start == found.tensors["a.weight"].offset
        assert {name: tensor.shape for name, tensor in found.tensors.items()} == shapes
        first, number = found.tensors["a.weight"], found.tensors["number"]
        stored = path.read_bytes()
        assert stored[first.offset : first.offset + first.nbytes] == weights.tobytes()
        assert struct.unpack_from("<f", stored, number.offset) == (7.0,)
    for size in (-1, 29):
        gguf_with(tmp_path / "x", (), tensors, data[: len(data) + size] + bytes(max(0, size)))
        with pytest.raises(UserError, match=r"x: has \d+ bytes where its header claims \d+; download it again"):
            gguf_file.read(tmp_path / "x")


def test_a_model_that_was_split(tmp_path: Path) -> None:
    """Any part leads to all; the first may hold no tensors."""
    paths = [gguf_part(tmp_path, 0, 3), gguf_part(tmp_path, 1, 3, "b"), gguf_part(tmp_path, 2, 3, "a")]
    for path in paths:
        found = gguf_file.read_all(path)
        assert found.files == tuple(paths)
        assert found.path == paths[0]
        assert [(name, tensor.path) for name, tensor in found.tensors.items()] == [("b", paths[1]), ("a", paths[2])]
    assert gguf_file.read_all(
        gguf_with(tmp_path / "alone.gguf", (), (gguf_tensor("a", (8,), 0),), bytes(32))
    ).files == (tmp_path / "alone.gguf",)


def test_names_of_parts() -> None:
    parts = ["a-b-00001-of-00002.gguf", "a-b-00002-of-00002.gguf"]
    assert gguf_names.split_names(parts[1]) == parts
    for alone in ("a.gguf", "a-00003-of-00002.gguf", "a-00000-of-00002.gguf", "a-1-of-2.gguf", "-00001-of-00002.gguf"):
        assert gguf_names.split_names(alone) == [alone]
    assert gguf_names.models(["x.gguf", parts[1], parts[0]]) == [["x.gguf"], parts]


def test_the_bounds_are_above_what_models_have() -> None:
    """Gemma's vocabulary, the largest, in the file that llama.cpp ships of it: 15,776,467 bytes."""
    assert gguf_header.MAX_BYTES > 4 * 15_776_467
