"""Headers of a model's folder: refused, or corrected if only one thing can be meant."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO
from model_folders import GPT2, HIDDEN, LLAMA, VOCAB, Tensors, gpt2, llama, write, zeros
from weight_files import save_file

from quantmill.checkpoint import headers, shards
from quantmill.common import manifest
from quantmill.common.program import UserError

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("shape", [(0,), (0, HIDDEN), (HIDDEN, 0)])
@pytest.mark.parametrize("name", [Q, "model.layers.0.rotary_emb.inv_freq"])
def test_an_empty_tensor_is_refused_by_name(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"model\.safetensors: {name} is empty \(its shape is \[.*0.*\]\); save"):
        headers.read(write(tmp_path / "m", LLAMA, llama() | zeros({name: shape})))


@pytest.mark.parametrize("padding", [VOCAB, 10**6, -VOCAB - 1, 10**30])
def test_padding_beyond_the_vocabulary_is_refused(tmp_path: Path, padding: int) -> None:
    with pytest.raises(UserError, match=rf"pad_token_id is {padding}, and the vocabulary ends at 47; set it to null"):
        headers.read(write(tmp_path / "m", LLAMA | {"pad_token_id": padding}))


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (LLAMA | {"pad_token_id": VOCAB - 1}, llama()),
        (LLAMA | {"pad_token_id": -1}, llama()),
        (LLAMA | {"pad_token_id": None}, llama()),
        (LLAMA | {"bos_token_id": VOCAB, "eos_token_id": [1, 10**6, -1]}, llama()),  # stand for no token
        (GPT2 | {"pad_token_id": VOCAB}, gpt2()),  # its embeddings have no place for one
    ],
)
def test_ids_that_stand_for_no_token_pass(tmp_path: Path, config: dict[str, Any], tensors: Tensors) -> None:
    headers.read(write(tmp_path / "m", config, tensors))


@pytest.mark.parametrize("name", headers.IDS)
@pytest.mark.parametrize("value", ["2", True, 1.5, {"id": 2}, [1, "2"]])
def test_an_id_must_be_a_number(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name} is .*, where a token's id is expected"):
        headers.read(write(tmp_path / "m", LLAMA | {name: value}))


PREFIXES = (
    "_orig_mod.",
    "module.",
    "base_model.model.",
    "model.",
    "module._orig_mod.",
    "_fsdp_wrapped_module.",
    "net.",
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_of_all_names_is_removed(tmp_path: Path, run_program: Callable, prefix: str) -> None:
    """The files are those of the same checkpoint without it, and the manifest says what was taken off."""
    plain = write(tmp_path / "plain")
    wrapped = write(tmp_path / "wrapped", LLAMA, {f"{prefix}{name}": value for name, value in llama().items()})
    for folder in (plain, wrapped):
        result = run_program("checkpoint.to_safetensors", folder, tmp_path / f"{folder.name}-out")
        assert result.returncode == 0, result.stderr
    assert f"note: {wrapped}: {'' if prefix == 'module._orig_mod.' else prefix}" in result.stderr
    assert "is taken off the tensors' names" in result.stderr
    ours, theirs = (shards.find(tmp_path / f"{name}-out") for name in ("wrapped", "plain"))
    assert ours.tensors().keys() == theirs.tensors().keys() == llama().keys()
    again = run_program("checkpoint.to_safetensors", plain, tmp_path / "cut", "--max-shard-size", "1GB")
    assert again.returncode == 0
    one, other = (manifest.sha256(tmp_path / name / "model.safetensors") for name in ("wrapped-out", "cut"))
    assert one == other
    said = json.loads((tmp_path / "wrapped-out/quantmill.json").read_text())["parameters"]
    assert sorted(said["dropped_of_names"].split(".")) == sorted(prefix.split("."))
    assert "dropped_of_names" not in json.loads((tmp_path / "plain-out/quantmill.json").read_text())["parameters"]


def test_a_wrapper_of_one_layer_is_removed(tmp_path: Path) -> None:
    """torch.compile and activation checkpointing wrap single layers."""
    inside = {name.replace("layers.1.", "layers.1._orig_mod."): value for name, value in llama().items()}
    found = headers.read(write(tmp_path / "m", LLAMA, inside))
    assert found.tensors.keys() == llama().keys()
    assert found.dropped == "_orig_mod."


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod.model."])
def test_a_prefix_of_gpt2s_names_is_removed(tmp_path: Path, prefix: str) -> None:
    own = {f"transformer.{name}": value for name, value in gpt2().items()} | zeros({"lm_head.weight": (VOCAB, HIDDEN)})
    found = headers.read(write(tmp_path / "m", GPT2, {f"{prefix}{name}": value for name, value in own.items()}))
    assert found.tensors.keys() == own.keys()


def test_names_of_architectures_that_begin_alike_stay(tmp_path: Path) -> None:
    """All names of a Llama without a head begin with model., and so do all of a Gemma 3's language model."""
    for part in ("", "model.language_model."):
        tensors = {
            name.replace("model.", part, 1) if part else name: value
            for name, value in llama().items()
            if name != "lm_head.weight"
        }
        config = LLAMA | {"tie_word_embeddings": True} | ({"model_type": "gemma3"} if part else {})
        found = headers.read(write(tmp_path / "m", config, tensors))
        assert found.dropped == ""
        assert found.tensors.keys() == tensors.keys()


def test_a_prefix_of_some_names_is_refused(tmp_path: Path) -> None:
    some = {f"module.{name}" if ".layers.1." in name else name: value for name, value in llama().items()}
    with pytest.raises(
        UserError, match=r"module\.model\.layers\.1\..* has a prefix that model\..* does not have; save"
    ):
        headers.read(write(tmp_path / "m", LLAMA, some))


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    twice = llama() | {f"_orig_mod.{Q}": llama()[Q]}
    with pytest.raises(UserError, match=rf"_orig_mod\.{Q} is {Q} twice; save"):
        headers.read(write(tmp_path / "m", LLAMA, twice))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json", "config.json")


@pytest.mark.parametrize("name", [*FILES, "model.safetensors", "model.safetensors.index.json", "vocab.txt"])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, run_program: Callable, name: str) -> None:
    folder = write(tmp_path / "m")
    (folder / name).write_text(POINTER)
    for program in ("fetch.link", "checkpoint.to_safetensors"):
        result = run_program(program, folder, tmp_path / "out")
        assert result.returncode == 1
        assert result.stderr.startswith(f"error: {folder / name}: only git-lfs's pointer to the ")
        assert result.stderr.endswith("run `git lfs pull` in its repository\n")
        assert len(result.stderr.splitlines()) == 1


def test_a_pointer_to_an_unused_file_passes(tmp_path: Path) -> None:
    """Of the other forms of the weights, which a clone for one form leaves out."""
    folder = write(tmp_path / "m")
    for name in ("flax_model.msgpack", "model.onnx", "pytorch_model.bin"):
        (folder / name).write_text(POINTER)
    headers.read(folder)


METADATA = [None, {}, [], "x", {"metadata": None}, {"metadata": {}}, {"metadata": {"total_size": "many"}}]


@pytest.mark.parametrize("more", METADATA)
def test_an_index_without_metadata_is_completed(tmp_path: Path, run_program: Callable, more: Any) -> None:
    """It is completed because transformers requires it; other keys stay."""
    file = "model-00001-of-00001.safetensors"
    folder = write(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / file)
    said = more if isinstance(more, dict) and "metadata" in more else {} if more is None else {"metadata": more}
    index = said | {"weight_map": dict.fromkeys(llama(), file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = run_program("checkpoint.to_safetensors", folder, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert written["metadata"] == {"total_size": sum(value.nbytes for value in llama().values())}
    assert written["weight_map"] == index["weight_map"]
    assert json.loads((folder / "model.safetensors.index.json").read_text()) == index  # the user's own


def test_an_index_with_metadata_is_unchanged(tmp_path: Path, run_program: Callable) -> None:
    file = "model-00001-of-00001.safetensors"
    folder = write(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / file)
    index = {"metadata": {"total_size": 1.0, "total_parameters": 5}, "weight_map": dict.fromkeys(llama(), file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run_program("checkpoint.to_safetensors", folder, tmp_path / "out").returncode == 0
    assert json.loads((tmp_path / "out/model.safetensors.index.json").read_text()) == index


def test_the_demos_folder_is_consistent(tmp_path: Path) -> None:
    found = headers.read(REPO / "demo")
    assert found.dropped == ""
    assert len(found.tensors) == 66
    folder = shutil.copytree(REPO / "demo", tmp_path / "demo")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 2048}))
    with pytest.raises(UserError, match="pad_token_id is 2048, and the vocabulary ends at 2047"):
        headers.read(folder)


def test_a_model_type_that_is_a_list_passes(tmp_path: Path) -> None:
    headers.read(write(tmp_path / "m", LLAMA | {"model_type": ["llama"]}))


def test_a_known_tensor_of_twice_the_length_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    save_file(llama() | {Q: np.zeros((HIDDEN, 2 * HIDDEN), np.float16)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"{Q} is \[16, 32\], and config.json makes it \[16, 16\]"):
        headers.read(folder)
