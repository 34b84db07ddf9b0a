"""A GGUF file that others built: taken if it is this model's, else refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_model import CONFIG, F32, INNER, KEYS, Q8_0, TENSORS, TOKENIZER, VOCABULARY, WIDTH, write, write_parts
from hub_server import Repository, serve
from prebuilt_model import fetch_prebuilt
from weight_files import save_file

from quantmill.common import manifest
from quantmill.common.program import UserError
from quantmill.fetch.prebuilt_layouts import gguf

__all__ = ["fetch_prebuilt"]  # a fixture


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "README.md").write_text("this model")
    save_file({"model.norm.weight": np.zeros(WIDTH, np.float16)}, folder / "model.safetensors")
    (folder / "quantmill.json").write_text(json.dumps({"source": {}, "parameter_count": 2432, "files": {}}))
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


@pytest.fixture
def fetch(fetch_prebuilt: Callable[..., str]) -> Callable[..., str]:
    return lambda artifact, *more, **words: fetch_prebuilt(artifact, "gguf", *more, **words)


@pytest.mark.parametrize("named", ["the folder", "the file"])
def test_a_file_of_this_model(fetch: Callable, theirs: Path, tmp_path: Path, named: str) -> None:
    """Spaces of added tokens may be written as such, and what pads the vocabulary may have any name."""
    path = write(theirs / "this-model.Q8_0.gguf")
    if named == "the file":
        write(theirs / "another.gguf")
    artifact = theirs if named == "the folder" else path
    fetch(artifact, good=True)
    content = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert set(content["files"]) == {"config.json", "tokenizer.json", "model.gguf"}
    copy = tmp_path / "out/model.gguf"
    assert copy.read_bytes() == path.read_bytes()
    assert not copy.samefile(path)
    assert (content["engine"], content["prebuilt"], content["tool"]) == ("llama_cpp", True, "unknown")
    assert content["source"]["path"] == str(artifact)
    assert content["source"]["sha256"] == {"model.gguf": manifest.sha256(path)}
    assert content["parameters"] == {
        "general.file_type": 7,
        "quantize.imatrix.dataset": "calibration.txt",
        "tensors": {"Q8_0": 2, "F32": 1},
    }
    assert content["weight_bytes"] == path.stat().st_size
    assert content["weight_bytes_per_token"] == (VOCABULARY + INNER) * 68 + 4 * WIDTH  # the head is tied


@pytest.mark.parametrize("named", ["the folder", "a part"])
def test_a_model_that_was_split(fetch: Callable, theirs: Path, tmp_path: Path, named: str) -> None:
    """Its parts keep their names: llama.cpp finds each by the first one's."""
    paths = write_parts(theirs)
    fetch(theirs if named == "the folder" else paths[1], good=True)
    content = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert set(content["files"]) == {"config.json", "tokenizer.json", *(path.name for path in paths)}
    assert set(content["source"]["sha256"]) == {path.name for path in paths}
    assert content["weight_bytes"] == sum(path.stat().st_size for path in paths)
    assert content["parameters"]["tensors"] == {"Q8_0": 2, "F32": 1}


def test_a_part_that_is_missing(fetch: Callable, theirs: Path) -> None:
    paths = write_parts(theirs)
    paths[1].unlink()
    assert fetch(theirs) == f"error: {paths[1]}: is missing, one of 2 files; download it\n"


def test_one_file_must_be_meant(fetch: Callable, theirs: Path) -> None:
    assert fetch(theirs) == f"error: {theirs}: holds no .gguf file; name a .gguf file as path\n"
    write(theirs / "a.gguf")
    write_parts(theirs)
    said = fetch(theirs)
    assert said == f"error: {theirs}: holds 2 models (a.gguf, this-00001-of-00002.gguf); name a .gguf file as path\n"
    assert fetch(theirs / "b.gguf") == f"error: {theirs}/b.gguf: there is no such file; download it\n"


def test_a_link_that_leads_out(fetch: Callable, theirs: Path, tmp_path: Path) -> None:
    (theirs / "a.gguf").symlink_to(write(tmp_path / "secret"))
    assert f"{theirs}/a.gguf: is a link that leads out of the model's folder; refused" in fetch(theirs)


def test_hashes_that_lie_beside_it(fetch: Callable, theirs: Path) -> None:
    path = write(theirs / "a.gguf")
    recorded = {"a.gguf": {"sha256": "0" * 64}}
    (theirs / "quantmill.json").write_text(json.dumps({"source": {}, "files": recorded}))
    assert f"{path}: does not have the SHA-256 that quantmill.json next to it names; fetch it again" in fetch(path)


def test_a_refusal_names_the_users_own_path(fetch: Callable, theirs: Path) -> None:
    path = write(theirs / "a.gguf", {"llama.block_count": 2})
    assert fetch(path) == f"error: {path}: is another model: its block_count is 2, this model's 1\n"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "qwen2"}, "is another model: its general.architecture is qwen2, this model's llama"),
    ({"general.architecture": None}, "is another model: its general.architecture is None, this model's llama"),
    ({"llama.block_count": None}, "is another model: its block_count is None, this model's 1"),
    ({"llama.embedding_length": 128}, "is another model: its embedding_length is 128, this model's 64"),
    ({"llama.feed_forward_length": 99}, "is another model: its feed_forward_length is 99, this model's 32"),
    ({"llama.feed_forward_length": [32, 99]}, "is another model: its feed_forward_length is [32 99], this model's 32"),
    ({"llama.attention.head_count": 8}, "is another model: its attention.head_count is 8, this model's 4"),
    ({"llama.attention.head_count_kv": 1}, "is another model: its attention.head_count_kv is 1, this model's 2"),
    ({"llama.attention.head_count_kv": None}, "is another model: its attention.head_count_kv is 4, this model's 2"),
    ({"tokenizer.ggml.tokens": list("abcdef")}, "is another model: its number of tokens is 6, this model's 5"),
    ({"tokenizer.ggml.tokens": None}, "is another model: its number of tokens is None, this model's 5"),
    ({"tokenizer.ggml.tokens": "abcde", "llama.vocab_size": 5}, "its tokenizer.ggml.tokens is not an array of texts"),
    ({"tokenizer.ggml.tokens": list("abcde")}, "has another vocabulary: its token 2 is 'c', this model's '▁c'"),
    (
        {"tokenizer.ggml.tokens": ["a", "b", " c", "<|d|>", "e"]},
        "has another vocabulary: its token 3 is '<|d|>', this model's '<|▁d|>'",
    ),
    ({"tokenizer.ggml.scores": [0.0] * 4}, "its tokenizer.ggml.scores is shorter than its tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.token_type": 1}, "its tokenizer.ggml.token_type is shorter than its tokenizer.ggml.tokens"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_a_file_that_is_not_this_models(theirs: Path, model: Path, keys: dict[str, Any], message: str) -> None:
    write(theirs / "model.gguf", keys)
    with pytest.raises(UserError) as caught:
        gguf.check(theirs, model, "gguf")
    assert str(caught.value).startswith(f"{theirs}/model.gguf: {message}")


def test_tokens_that_the_file_lacks(theirs: Path, model: Path) -> None:
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"added_tokens": [{"id": 5, "content": "f"}]}))
    write(theirs / "model.gguf")
    with pytest.raises(UserError, match="its token 5 is None, this model's 'f'"):
        gguf.check(theirs, model, "gguf")


def test_more_layers_than_llama_cpp_has(theirs: Path, model: Path) -> None:
    """Of a model whose config.json does not say how many it has."""
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": None}))
    write(theirs / "model.gguf", {"llama.block_count": 513})
    with pytest.raises(UserError, match=r"its block_count is 513, and llama\.cpp has 512 layers; refused"):
        gguf.check(theirs, model, "gguf")


def test_embeddings_of_another_size(theirs: Path, model: Path) -> None:
    write(theirs / "model.gguf", None, "output_norm.weight")
    with pytest.raises(UserError, match=r"its token_embd.weight is missing, its metadata's \[5, 64\]; refused"):
        gguf.check(theirs, model, "gguf")


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({}, {"tokenizer.ggml.tokens": None, "llama.vocab_size": 5}),  # made without a tokenizer
        ({"num_key_value_heads": 4}, {"llama.attention.head_count_kv": None}),
        ({"model_type": "mixtral"}, {}),
        ({"model_type": "of tomorrow"}, {}),
        ({"num_key_value_heads": None, "intermediate_size": None}, {}),  # nothing is known
        ({}, {"llama.block_count": 2, "llama.nextn_predict_layers": 1}),
        ({}, {"llama.attention.head_count_kv": [0, 2], "llama.feed_forward_length": [32, 32]}),
        ({"num_key_value_heads": 4}, {"llama.attention.head_count_kv": 1, "llama.attention.kv_lora_rank": 8}),
        ({"text_config": CONFIG, "hidden_size": 1}, {}),
    ],
)
def test_spellings_of_the_same_model(theirs: Path, model: Path, config: dict[str, Any], keys: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | config))
    write(theirs / "model.gguf", keys)
    assert gguf.check(theirs, model, "gguf")["weight_files"] == ["model.gguf"]


OTHERS = ("llama.vocab_size", "llama.nextn_predict_layers", "llama.expert_used_count", "llama.attention.kv_lora_rank")


@pytest.mark.parametrize("key", [*KEYS, *OTHERS])
def test_values_of_any_type_are_refused_or_harmless(theirs: Path, model: Path, key: str) -> None:
    for value in (0, 1, 2**63, 1.5, float("nan"), "", "x", [], [1], [0] * 9, [0.5] * 5, ["x"], ["x"] * 5):
        path = write(theirs / "model.gguf", {key: value})
        try:
            facts = gguf.check(theirs, model, "gguf")
        except UserError as error:
            assert str(error).startswith(f"{path}: ")
            assert "\n" not in str(error)
        else:
            json.dumps(facts, allow_nan=False)


def test_experts_count_as_far_as_they_are_used(theirs: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And embeddings that are not the head too with one row."""
    monkeypatch.setitem(TENSORS, "blk.0.ffn_up_exps.weight", ((WIDTH, INNER, 4), F32))
    monkeypatch.setitem(TENSORS, "output.weight", ((WIDTH, VOCABULARY), Q8_0))
    write(theirs / "model.gguf", {"llama.expert_used_count": 1})
    others = (1 + VOCABULARY + INNER) * 68 + 4 * WIDTH
    assert gguf.check(theirs, model, "gguf")["weight_bytes_per_token"] == others + INNER * WIDTH * 4


def test_what_the_gate_reads(theirs: Path) -> None:
    write(theirs / "model.gguf")
    assert gguf.gate_layout(theirs) == "gguf"
    write(theirs / "model.gguf", None, "output_norm.weight")
    assert gguf.gate_layout(theirs) == "source"


def test_a_file_of_the_hub(fetch: Callable, theirs: Path, tmp_path: Path) -> None:
    """One is named, of a folder too; of a model that was split any part. The others are not fetched."""
    stored = {path.name: path.read_bytes() for path in [write(theirs / "q8.gguf"), *write_parts(theirs)]}
    parts = [name for name in stored if name != "q8.gguf"]
    with serve() as hub:
        files = {"q8.gguf": stored["q8.gguf"], "bad.gguf": b"GGUF" + bytes(99), "modeling_x.py": b"raise SystemExit"}
        repository = Repository(files | {f"parts/{name}": stored[name] for name in parts})
        hub.repositories["models/acme/tiny-gguf"] = repository
        cache = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        for file, names in (("q8.gguf", ["model.gguf"]), (f"parts/{parts[1]}", parts)):
            fetch("acme/tiny-gguf", "--revision=main", f"--file={file}", good=True, **cache)
            content = json.loads((tmp_path / "out/quantmill.json").read_text())
            assert set(content["files"]) == {"config.json", "tokenizer.json", *names}
            source = [content["source"][key] for key in ("kind", "hub", "commit", "file")]
            assert source == ["hub", "acme/tiny-gguf", repository.commit, file]
            (tmp_path / "out").rename(tmp_path / f"out {len(names)}")
        said = fetch("acme/tiny-gguf", "--revision=main", "--file=bad.gguf", **cache)
        do = "take the little-endian file, or convert it with gguf_convert_endian.py"
        assert said == f"error: acme/tiny-gguf/bad.gguf: is big-endian; {do}\n"
        known = "name one of bad.gguf, parts/this-00001-of-00002.gguf, parts/this-00002-of-00002.gguf, q8.gguf\n"
        said = fetch("acme/tiny-gguf", "--revision=main", "--file=q4.gguf", **cache)
        assert said == f"error: acme/tiny-gguf: holds no q4.gguf; {known}"
        del repository.files[f"parts/{parts[0]}"]
        said = fetch("acme/tiny-gguf", "--revision=main", f"--file=parts/{parts[1]}", **cache)
        assert "acme/tiny-gguf: holds not all of parts/this-00002-of-00002.gguf; name one of bad.gguf, parts/" in said
