"""An artifact that others built: taken if it is this model's, else refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import Fault, Repository, serve
from prebuilt_model import (
    GROUP,
    INPUTS,
    LAYER,
    OUTPUTS,
    QUANTIZATION,
    TOKENIZER,
    VOCABULARY,
    fetch,
    fetch_prebuilt,
    halves,
    model,
    pack,
    refusal,
    write_theirs,
)

from quantmill.common import manifest

__all__ = ["fetch", "fetch_prebuilt", "model"]  # fixtures


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_an_artifact_of_this_model(fetch: Callable, tmp_path: Path, layout: str) -> None:
    tensors = pack(layout)
    theirs = write_theirs(tmp_path, tensors, quantization_config=QUANTIZATION | {"quant_method": layout})
    fetch(theirs, layout, good=True)
    content = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert (content["format"], content["engine"], content["prebuilt"]) == ("theirs", "gptqmodel", True)
    assert content["source"]["kind"] == "path"
    assert content["source"]["path"] == str(theirs)
    assert content["source"]["sha256"] == {"model.safetensors": manifest.sha256(theirs / "model.safetensors")}
    assert content["parameters"] == {"bits": 4, "group_size": GROUP, "sym": True}
    assert content["parameter_count"] == 1408
    assert content["weight_bytes_per_token"] == sum(value.nbytes for value in tensors.values())  # the head is tied
    assert set(content["files"]) == {"config.json", "tokenizer.json", "model.safetensors"}


UNREAD = [
    ("model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(8, np.float32)),
    (f"{LAYER}.bias", np.zeros(OUTPUTS, np.float16)),  # as early versions of auto-gptq wrote for every layer
    ("model.layers.1.enorm.weight", halves(INPUTS)),
]


@pytest.mark.parametrize(("name", "value"), UNREAD)
def test_harmless_tensors_that_nothing_reads_are_named(
    fetch: Callable, tmp_path: Path, name: str, value: np.ndarray
) -> None:
    """It counts neither as weights nor as what a token reads."""
    tensors = pack()
    fetch(write_theirs(tmp_path, tensors | {name: value}), good=True)
    content = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert content["source"]["unread"] == [name]
    assert content["weight_bytes_per_token"] == sum(each.nbytes for each in tensors.values())
    size = (tmp_path / "theirs/model.safetensors").stat().st_size
    assert content["weight_bytes"] == size - value.nbytes
    assert content["bits_per_weight"] == 8 * content["weight_bytes"] / 1408


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{LAYER}.bias", np.ones(OUTPUTS, np.float16)),
        (f"{LAYER}.lora_A.weight", halves(4, INPUTS)),
        (f"{LAYER}.weight_scale", halves(OUTPUTS, 1)),  # of another layout
        ("model.layers.1.mlp.up_proj.qweight", np.ones((8, OUTPUTS), np.int32)),
        ("lm_head.weight", halves(VOCABULARY, INPUTS)),  # of a model that ties it
    ],
)
def test_tensors_that_this_model_does_not_have(fetch: Callable, tmp_path: Path, name: str, value: np.ndarray) -> None:
    said = refusal(fetch, tmp_path, {}, pack() | {name: value})
    assert f"this model has no place for {name}; name an artifact of this model, or remove them if" in said


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 128}, "is another model: its hidden_size is 128, this model's 64"),
        ({"num_key_value_heads": 2}, "is another model: its num_key_value_heads is 2, this model's 4"),
        ({"model_type": "qwen2"}, "is another model: its model_type is 'qwen2', this model's 'llama'"),
        ({"vocab_size": 6}, "is another model: its vocab_size is 6, this model's 5"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "has an auto_map, which names Python code; Quantmill does not run it"),
        ({"attribute_map": {"a": "b"}}, "has an attribute_map"),
        (
            {"quantization_config": QUANTIZATION | {"bits": 8}},
            f"its {LAYER}.qweight is [8, 16]; 8 bits and groups of 32, its config's, make [16, 16] of this model's",
        ),
        (
            {"quantization_config": QUANTIZATION | {"group_size": 64}},
            f"its {LAYER}.scales is [2, 16]; 4 bits and groups of 64, its config's, make [1, 16] of this model's layer",
        ),
        ({"quantization_config": QUANTIZATION | {"bits": "4"}}, "its config names '4' bits and groups of 32"),
        ({"quantization_config": QUANTIZATION | {"bits": True}}, "its config names True bits and groups of 32; both"),
        ({"quantization_config": QUANTIZATION | {"group_size": 0}}, "its config names 4 bits and groups of 0; both"),
        ({"quantization_config": QUANTIZATION | {"group_size": -5}}, "its config names 4 bits and groups of -5; both"),
        ({"quantization_config": QUANTIZATION | {"group_size": 10**30}}, "its config names 4 bits and groups of 10000"),
        ({"quantization_config": {"quant_method": "awq"}}, "its quantization_config says 'awq', not 'gptq'"),
        ({"quantization_config": None}, "its config.json has no quantization_config; if quantize_config.json has it"),
        ({"quantization_config": [1]}, "its config.json has no quantization_config; if quantize_config.json has it"),
    ],
)
def test_a_config_of_another_model(fetch: Callable, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    assert message in refusal(fetch, tmp_path, config)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            pack() | {NORM: halves(2 * INPUTS)},
            "theirs: is another model: its model.norm.weight is [128], this model's [64]",
        ),
        ({name: each for name, each in pack().items() if name != NORM}, "theirs: lacks model.norm.weight, which this"),
        ({f"module.{name}": each for name, each in pack().items()}, "its names have module. before the model's own"),
        (
            pack() | {"model.norm.qweight": np.zeros((8, 8), np.int32)},
            "theirs: holds model.norm.qweight, and this model's model.norm.weight is not a matrix",
        ),
    ],
)
def test_tensors_of_another_model(fetch: Callable, tmp_path: Path, tensors: dict, message: str) -> None:
    assert message in refusal(fetch, tmp_path, {}, tensors)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_labels": 10**9}, "config.json: num_labels is 1000000000, which is more than its weights can have"),
        ({"n_layers": 10**7}, "config.json: n_layers is 10000000, which is more than its weights can have"),
        ({"text_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers is 1000000, which is more than its weights"),
        ({"vision_config": {"num_hidden_layers": 10**9}}, "vision_config.num_hidden_layers is 1000000000, which is"),
        ({"pad_token_id": VOCABULARY}, "config.json: pad_token_id is 5, and the vocabulary ends at 4; set it to null"),
    ],
)
def test_sizes_that_this_model_does_not_have(
    fetch: Callable, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    said = refusal(fetch, tmp_path, config)
    assert message in said
    assert str(tmp_path / "theirs") in said


def test_only_the_artifacts_index_is_completed(fetch: Callable, tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path)
    shard, index = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
    (theirs / "model.safetensors").rename(theirs / shard)
    (theirs / index).write_text(json.dumps({"weight_map": dict.fromkeys(pack(), shard)}))
    fetch(theirs, good=True)
    whole = json.loads((tmp_path / "out" / index).read_text())
    assert whole["metadata"] == {"total_size": sum(value.nbytes for value in pack().values())}
    assert json.loads((theirs / index).read_text()) == {"weight_map": whole["weight_map"]}


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ({"model": {"vocab": dict(zip("abdce", range(5), strict=True))}}, "its token 2 is 'd', this model's 'c'"),
        (TOKENIZER | {"added_tokens": [{"id": 5, "content": "<pad>"}]}, "its token 5 is '<pad>', this model's None"),
    ],
)
def test_another_vocabulary(fetch: Callable, tmp_path: Path, tokenizer: dict, said: str) -> None:
    assert f"has another vocabulary: {said}" in refusal(fetch, tmp_path, {}, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "content",
    [
        {"model": [1]},
        {"model": {"vocab": 5}},
        {"model": {"vocab": {"a": "x", "b": 1}}},
        {"model": {"vocab": {"a": [1]}}},
        {"model": {"vocab": [[], []]}},
        {"model": {"vocab": [[1, 0.5]]}},
        TOKENIZER | {"added_tokens": [5]},
        TOKENIZER | {"added_tokens": [{"content": "x"}]},
        TOKENIZER | {"added_tokens": [{"id": [1], "content": "x"}]},
    ],
)
def test_a_tokenizer_of_wrong_types(fetch: Callable, tmp_path: Path, content: Any) -> None:
    said = refusal(fetch, tmp_path, {}, tokenizer=content)
    path = tmp_path / "theirs/tokenizer.json"
    assert said == f"error: {path}: its tokens are not texts with numbers; download it again\n"


def test_autoawqs_older_name_of_the_group_size(fetch: Callable, tmp_path: Path) -> None:
    words = {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP}
    theirs = write_theirs(tmp_path, pack("awq"), quantization_config=words)
    fetch(theirs, "awq", good=True)


def test_unprintable_parameters_are_left_out(fetch: Callable, tmp_path: Path) -> None:
    """The page refuses NaN, for one, and no row would be shown."""
    words = {"sym": float("nan"), "desc_act": {"a": [1]}, "version": "x" * 1000, "zero_point": True}
    words["meta"] = {"quantizer": ["gptqmodel:4.0", "\x1b[31m"]}
    theirs = write_theirs(tmp_path, quantization_config=QUANTIZATION | words)
    fetch(theirs, good=True)
    content = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert content["parameters"] == {"bits": 4, "group_size": GROUP, "zero_point": True}
    assert content["tool"] == "gptqmodel:4.0, \\x1b[31m"


MANIFEST = "quantmill.json"
NAMELESS, POINTER = (
    f"{MANIFEST}: names no files with their hashes; remove it",
    "version https://git-lfs.github.com/spec/v1",
)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", POINTER, "generation_config.json: only git-lfs's pointer to the file; run"),
        (MANIFEST, '{"source": {}, "files": ["model.safetensors"]}', NAMELESS),
        (MANIFEST, '{"source": {}, "files": {"model.safetensors": 3}}', NAMELESS),
        (MANIFEST, '{"source": {}, "files": null}', NAMELESS),
        (
            MANIFEST,
            '{"source": {}, "files": {"model.safetensors": {"sha256": "0000"}}}',
            "does not have the SHA-256 that quantmill.json next to it names; fetch it again",
        ),
        (  # auto-gptq reads the one, all others the other
            "quantize_config.json",
            '{"bits": 4, "group_size": 64}',
            "config.json and quantize_config.json name another group_size; one of them is wrong",
        ),
    ],
)
def test_a_file_that_contradicts_the_others(
    fetch: Callable, tmp_path: Path, name: str, content: str, message: str
) -> None:
    theirs = write_theirs(tmp_path)
    (theirs / name).write_text(content)
    assert message in fetch(theirs)


def test_pickled_weights(fetch: Callable, tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path)
    (theirs / "model.safetensors").rename(theirs / "pytorch_model.bin")
    assert "its weights are pickled (bin); name an artifact with safetensors" in fetch(theirs)


def test_an_artifact_of_the_hub(run_program: Callable, model: Path, tmp_path: Path) -> None:
    """At a branch's commit, by its layout's files alone, each with the hub's hash."""
    theirs = write_theirs(tmp_path)
    (theirs / "modeling_x.py").write_text("raise SystemExit")
    with serve() as hub:
        hub.repositories["models/acme/tiny-gptq"] = repository = Repository.of(theirs)
        words = ["--revision", "main", "--model", model, "--layout", "gptq", "--format", "theirs"]
        words += ["--engine", "gptqmodel"]
        cache = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        result = run_program("fetch.prebuilt", "acme/tiny-gptq", tmp_path / "out", *words, **cache)
        assert result.returncode == 0, result.stderr
        source = json.loads((tmp_path / "out/quantmill.json").read_text())["source"]
        assert (source["kind"], source["hub"], source["commit"]) == ("hub", "acme/tiny-gptq", repository.commit)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {"config.json", "tokenizer.json", "model.safetensors", "quantmill.json"}
        repository.files["model.safetensors"] += b"x"
        hub.faults.append(Fault("/cdn/", corrupt=True))
        result = run_program("fetch.prebuilt", "acme/tiny-gptq", tmp_path / "again", *words, **cache)
    assert "model.safetensors came with other bytes than the hub's hash says" in result.stderr
    assert not (tmp_path / "again").exists()
