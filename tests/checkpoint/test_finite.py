"""The workflow takes no weights that are NaN or infinite, wherever they lie; the converters alone carry every byte."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forge import safetensors_with
from raw_tensor import write_tensor
from workflows import SNAKEMAKE, study

from quantmill.checkpoint import finite, safetensors_file
from quantmill.checkpoint.tensor import CHUNK
from quantmill.common import manifest
from quantmill.common.program import UserError

# every pattern of the small types, from their definitions; of float32 and float64 those at the border
SMALL = {
    "F16": {bits for bits in range(2**16) if bits >> 10 & 31 == 31},
    "BF16": {bits for bits in range(2**16) if bits >> 7 & 255 == 255},
    "F8_E5M2": {bits for bits in range(2**8) if bits >> 2 & 31 == 31},
    "F8_E4M3": {0x7F, 0xFF},  # "FN": no infinities
    "F8_E8M0": {0xFF},  # no sign
    "U8": set(),
    "I16": set(),
    "BOOL": set(),
}
WIDTH = {"F16": "<u2", "BF16": "<u2", "I16": "<u2", "F32": "<u4", "F64": "<u8"}
LARGE = {
    "F32": ([0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF], [0x7F7FFFFF, 0xFF7FFFFF, 0x80000000, 1]),
    "F64": (
        [0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000001, 0x7FF0000000000001, 2**64 - 1],
        [0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 1 << 63, 0x000FFFFFFFFFFFFF],
    ),
}


def places(dtype: str, patterns: list[int]) -> list[int | None]:
    """Return what is found after a number in pieces that end with each of these patterns."""
    kind = np.dtype(WIDTH.get(dtype, "u1"))
    return [
        finite.first_not_finite(memoryview(np.array([1, 0, pattern, pattern], kind).tobytes()), dtype)
        for pattern in patterns
    ]


@pytest.mark.parametrize("dtype", SMALL)
def test_every_pattern_of_the_small_types(dtype: str) -> None:
    patterns = list(range(2 ** (8 * np.dtype(WIDTH.get(dtype, "u1")).itemsize)))
    found = places(dtype, patterns)
    assert {pattern for pattern, place in zip(patterns, found, strict=True) if place is not None} == SMALL[dtype]
    assert set(found) <= {None, 2}


@pytest.mark.parametrize("dtype", LARGE)
def test_patterns_at_the_border_of_the_large_types(dtype: str) -> None:
    none, numbers = LARGE[dtype]
    assert places(dtype, none) == [2] * len(none)
    assert places(dtype, numbers) == [None] * len(numbers)


def test_both_parts_of_a_complex_number() -> None:
    for part, place in ((4, 2), (5, 2), (1, 0)):
        values = np.ones(8, "<f4")
        values[part] = np.nan
        assert finite.first_not_finite(memoryview(values.tobytes()), "C64") == place
    assert finite.first_not_finite(memoryview(b""), "F32") is None


def test_a_files_hash_and_its_first_fault(tmp_path: Path) -> None:
    values = np.ones((CHUNK // 4, 3), "<f4")
    tensors = [write_tensor(tmp_path / "w", values.tobytes(), "F32", values.size)]
    safetensors_file.write(tmp_path / "x", tensors)
    held = safetensors_file.read(tmp_path / "x")
    assert finite.sha256(tmp_path / "x", held.values()) == manifest.sha256(tmp_path / "x")
    assert finite.sha256(tmp_path / "w", [tensors[0]]) == manifest.sha256(tmp_path / "w")


@pytest.mark.parametrize(
    ("dtype", "kind", "bits"), [("F16", "<u2", 0x7E00), ("F8_E4M3", "u1", 0x7F), ("F32", "<u4", 0xFF800000)]
)
def test_where_a_tensors_first_fault_is(tmp_path: Path, dtype: str, kind: str, bits: int) -> None:
    """In its second piece, as indices of the whole; other dtypes have none."""
    values = np.zeros((CHUNK // 2, 3), kind)
    assert finite.first_place(write_tensor(tmp_path / "w", values.tobytes(), dtype, values.size)) is None
    values[CHUNK // 2 - 1, 1:] = bits
    tensor = write_tensor(tmp_path / "w", values.tobytes(), dtype, values.size)
    assert finite.first_place(replace(tensor, shape=values.shape, stride=(3, 1))) == [CHUNK // 2 - 1, 1]
    assert finite.first_place(replace(tensor, dtype="U8", shape=(3,), stride=(1,))) is None


def model(folder: Path, place: tuple[int, int], value: float) -> Path:
    """Write a model of three chunks with one changed value in its embeddings."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    table = np.ones((CHUNK // 512, 3 * 256), "<f2")
    table[place] = value
    entries = {
        "a.ids": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "model.embed_tokens.weight": {"dtype": "F16", "shape": table.shape, "data_offsets": [4, 4 + table.nbytes]},
    }
    safetensors_with(folder / "model.safetensors", json.dumps(entries).encode(), b"\xff" * 4 + table.tobytes())
    return folder


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_nan_in_linked_or_converted_weights(tmp_path: Path, run_program: Callable, form: str, value: float) -> None:
    source = model(tmp_path / "m", (511, 767), value)
    if form == "bin":
        converted = run_program("checkpoint.to_bin", source, tmp_path / "bin")
        assert converted.returncode == 0, converted.stderr
        source = tmp_path / "bin"
    conversion = ("checkpoint.to_safetensors", source, tmp_path / "out", "--verify")
    result = run_program(*conversion, "--finite")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    file = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[form]
    assert line == (
        f"error: {source / file}: model.embed_tokens.weight is NaN or infinite at [511, 767], which is not a weight; "
        "download it again"
    )
    assert not (tmp_path / "out").exists()
    assert run_program(*conversion).returncode == 0  # by hand, a converter changes no byte
    found = safetensors_file.read(tmp_path / "out/model.safetensors")["model.embed_tokens.weight"]
    with pytest.raises(UserError, match=r"embed_tokens\.weight is NaN or infinite at \[511, 767\]"):
        finite.sha256(found.path, [found])


def test_finite_weights_have_their_hashes(tmp_path: Path, run_program: Callable) -> None:
    source = model(tmp_path / "m", (0, 0), 65504)
    assert run_program("checkpoint.to_bin", source, tmp_path / "bin").returncode == 0
    for name in ("m", "bin"):
        out = tmp_path / f"from {name}"
        result = run_program("checkpoint.to_safetensors", tmp_path / name, out, "--verify", "--finite")
        assert result.returncode == 0, result.stderr
        said = json.loads((out / manifest.NAME).read_text())
        assert said["files"]["model.safetensors"]["sha256"] == manifest.sha256(out / "model.safetensors")
        assert said["parameters"]["finite"] is True
    copy, original = tmp_path / "from m/model.safetensors", source / "model.safetensors"
    assert copy.read_bytes() == original.read_bytes()
    assert not copy.samefile(original)


def test_the_workflow_asks_for_it(
    run_program: Callable, call: Callable, checkout: Callable, torch_python: Path
) -> None:
    root = checkout()
    assert run_program("checkpoint.to_safetensors", "demo", root / "mine").returncode == 0
    name = "model.embed_tokens.weight"
    index = json.loads((root / "mine/model.safetensors.index.json").read_text())
    with (root / "mine" / index["weight_map"][name]).open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
        file.seek(8 + size + entry["data_offsets"][0] + 2 * (3 * entry["shape"][1] + 4))
        file.write(np.float16(np.inf).tobytes())
    study(root, "models: {a: {source: {path: mine}}}\n")
    result = call(SNAKEMAKE, "--cores", "1", "artifacts/a/safetensors", "--configfile", "study.yaml", cwd=root)
    assert result.returncode == 1
    assert "model.embed_tokens.weight is NaN or infinite at [3, 4]" in result.stdout + result.stderr
    assert not (root / "artifacts/a/safetensors").exists()
