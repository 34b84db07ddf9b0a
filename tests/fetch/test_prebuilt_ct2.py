"""A CTranslate2 folder that others built: taken if it is this model's, else refused in one line."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import ct2_model
import numpy as np
import pytest
from conftest import REPO
from prebuilt_model import CONFIG, VOCABULARY, fetch, fetch_prebuilt, model

__all__ = ["fetch", "fetch_prebuilt", "model"]  # fixtures


def write_ct2(tmp_path: Path, change: Callable[[bytes], bytes] = bytes, int8: bool = True, **files: str) -> Path:
    """Write a CTranslate2 folder of this model, `change`d; `files` replace its others, an empty text removes one."""
    content = ct2_model.pack(ct2_model.variables(CONFIG, int8).items())
    theirs = ct2_model.write(tmp_path / "theirs", change(content))
    for name, text in ({"config": "{}", "vocabulary": '["a", "b", "c", "d", "e"]'} | files).items():
        (theirs / f"{name}.json").unlink(missing_ok=True)
        if text:
            (theirs / f"{name}.json").write_text(text)
    return theirs


def test_ctranslate2_of_this_model(fetch: Callable, tmp_path: Path) -> None:
    fetch(write_ct2(tmp_path), "ct2", good=True)


def shorten_norm(_: bytes) -> bytes:
    """Return a model.bin with a last norm of 63 instead of 64, which CTranslate2 would load."""
    arrays = ct2_model.variables(CONFIG, int8=True)
    arrays["decoder/layer_norm/gamma"] = arrays["decoder/layer_norm/gamma"][:63]
    return ct2_model.pack(arrays.items())


def lie_of_size(content: bytes) -> bytes:
    """Claim a matrix that is larger than its bytes."""
    name = b"decoder/layer_0/ffn/linear_0/weight\0\2"
    return content.replace(name + struct.pack("<II", 16, 64), name + struct.pack("<II", 2**31, 2**31))


@pytest.mark.parametrize(
    ("change", "files", "message"),
    [
        (bytes, {"vocabulary": "", "shared_vocabulary": '["a"]'}, "theirs: holds no vocabulary.json; convert the"),
        (bytes, {"vocabulary": '{"a": 1}'}, "vocabulary.json: should hold a JSON array"),
        (bytes, {"config": ""}, "config.json is missing"),
        (bytes, {"config": "[1]"}, "config.json: should hold a JSON object"),
        (lambda content: content[:-1], {}, "model.bin: cut off, or not a CTranslate2 model"),
        (
            lie_of_size,
            {},
            "model.bin: 'decoder/layer_0/ffn/linear_0/weight' has 1024 bytes for [2147483648, 2147483648] of int8",
        ),
        (shorten_norm, {}, "theirs/model.bin: decoder/layer_norm/gamma should be [64] of float32"),
    ],
)
def test_ctranslate2_must_be_loadable(
    fetch: Callable, tmp_path: Path, change: Callable[[bytes], bytes], files: dict[str, str], message: str
) -> None:
    assert message in fetch(write_ct2(tmp_path, change, **files), "ct2")


def test_ctranslate2_of_gpt2(fetch: Callable, model: Path, tmp_path: Path) -> None:
    """GPT-2 says n_embd and n_layer."""
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": VOCABULARY}))
    fetch(write_ct2(tmp_path), "ct2", good=True)


def test_int16_weights_are_not_compared_with_the_source(tools_python: Path, call: Callable, tmp_path: Path) -> None:
    ask = "import sys; from pathlib import Path; from quantmill.fetch.prebuilt_layouts import ct2"
    ask += "; print([ct2.gate_layout(Path(each)) for each in sys.argv[1:]])"
    arrays = ct2_model.variables(CONFIG)
    shorts = {name: each.astype(np.int16) if each.ndim == 2 else each for name, each in arrays.items()}
    folders = []
    for name, change in (("int8", bytes), ("int16", lambda _: ct2_model.pack(shorts.items()))):
        folders.append(write_ct2(tmp_path / name, change))
    folders.append(write_ct2(tmp_path / "floats", int8=False))
    result = call(tools_python, "-c", ask, *folders, PYTHONPATH=str(REPO / "scripts"))
    assert result.stdout == "['ct2', None, 'source']\n", result.stderr


def test_ctranslate2_of_another_model(fetch: Callable, tmp_path: Path, demo: Path) -> None:
    said = fetch(demo / "artifacts/demo/ct2-int8", "ct2")
    assert "is another model: vocabulary, width and layers are [2048, 256, 7], this model's [5, 64, 1]" in said


def test_ctranslate2_with_another_vocabulary(run_program: Callable, tmp_path: Path, demo: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for path in (demo / "artifacts/demo/ct2-int8").iterdir():
        if path.name != "quantmill.json":
            (theirs / path.name).write_bytes(path.read_bytes())
    of = ["--model", demo / "artifacts/demo/safetensors", "--layout", "ct2", "--format", "theirs"]
    of += ["--engine", "ctranslate2"]
    assert run_program("fetch.prebuilt", theirs, tmp_path / "out", *of).returncode == 0
    words = json.loads((theirs / "vocabulary.json").read_text())
    words[300], words[301] = words[301], words[300]
    (theirs / "vocabulary.json").write_text(json.dumps(words))
    result = run_program("fetch.prebuilt", theirs, tmp_path / "other", *of)
    assert f"has another vocabulary: its token 300 is {words[300]!r}" in result.stderr
    assert not (tmp_path / "other").exists()
