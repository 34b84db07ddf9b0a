"""The tensors that a model uses: buffers are dropped by name, and other unread tensors are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from raw_tensor import write_tensor

from quantmill.checkpoint import safetensors_file, shards
from quantmill.checkpoint.selection import select
from quantmill.common.program import UserError
from quantmill.plan import vllm_parallelism


@pytest.fixture(scope="module")
def facts(torch_python: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = call(torch_python, REPO / "tests/checkpoint/used_tensors_checks.py", tmp_path_factory.mktemp("used"))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "mixtral", "qwen3_moe", "qwen3_5", "deepseek"])
def test_a_whole_model_uses_all_that_is_stored(facts: dict[str, Any], name: str) -> None:
    assert facts[f"{name} whole"] == {"used": 0, "all": True, "beside": [], "dropped": []}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.bias",
        "model.layers.0.self_attn.masked_bias",
        "model.embeddings.position_ids",
    ],
)
def test_buffers_of_older_libraries_are_dropped(facts: dict[str, Any], name: str) -> None:
    assert facts[f"llama {name}"] == {"used": 0, "all": True, "beside": [], "dropped": [name]}


def test_masks_that_the_class_ignores_are_dropped(facts: dict[str, Any]) -> None:
    found = facts["gpt2 masks"]
    assert found["all"]
    assert sorted(found["dropped"]) == ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]


NO_PLACE, RANDOM = "the model of config.json has no place for ", "libraries would fill at random"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a bias", f"{NO_PLACE}model.layers.0.self_attn.q_proj.bias; config.json gives the model no such bias"),
        ("a bias that is a row of a mask", f"{NO_PLACE}model.layers.0.self_attn.q_proj.bias; "),
        ("a layer more", "model.layers.2.input_layernorm.weight and 8 more; config.json says num_hidden_layers 2: "),
        ("1 layers", "model.layers.1.input_layernorm.weight and 8 more; config.json says num_hidden_layers 1: "),
        ("-3 layers", "model.layers.0.input_layernorm.weight and 17 more; config.json says num_hidden_layers -3: "),
        (
            "a layer too few",
            f"lacks model.layers.2.input_layernorm.weight and 8 more, which the model of config.json has and {RANDOM}",
        ),
        ("other sizes", "down_proj.weight is [32, 32], and [32, 16] in the model of config.json (and 5 more)"),
        ("int8", "model.layers.0.mlp.up_proj.weight holds I8, and nothing scales it; name a model with the original"),
        ("float8", "model.layers.0.mlp.up_proj.weight holds F8_E4M3, and nothing scales it"),
        ("int8 with a scale", f"{NO_PLACE}model.layers.0.mlp.up_proj.weight_scale; its weights are quantized: "),
        ("a scale alone", f"{NO_PLACE}model.layers.0.mlp.up_proj.weight_scale_inv; its weights are quantized: "),
        ("lora", "q_proj.lora_A.default.weight; they are an adapter's: merge it into the base model's weights first"),
        ("a head for classes", f"{NO_PLACE}score.weight; correct config.json, or take them out"),
        ("no head", "lacks lm_head.weight, which the model of config.json has"),
        ("an expert too few", "experts.down_proj is [3, 32, 32], and [4, 32, 32] in the model of config.json"),
        ("fewer experts", "experts.down_proj is [4, 32, 32], and [3, 32, 32] in the model"),
        ("no router", "lacks model.layers.0.mlp.gate.weight, which"),
        ("deepseek's layer too many", f"{NO_PLACE}model.layers.61.input_layernorm.weight and "),
        ("an unknown model", "transformers cannot build a language model from it ("),
    ],
)
def test_what_does_not_fit_the_model_is_named(facts: dict[str, Any], name: str, said: str) -> None:
    assert said in facts[name]["error"], facts[name]["error"]


def test_a_stored_tied_head_is_used(facts: dict[str, Any]) -> None:
    """checkpoint.to_safetensors drops it, once it has seen that it is the embeddings."""
    assert facts["a tied head that is stored"]["dropped"] == []


def test_multi_token_prediction_layers_are_dropped(facts: dict[str, Any]) -> None:
    """DeepSeek numbers them on after the others; Qwen3-Next calls them mtp."""
    found = facts["deepseek's predictor"]
    assert found["all"]
    assert found["dropped"][:1] == ["model.layers.2.eh_proj.weight"]
    assert all(name.startswith("model.layers.2.") for name in found["dropped"])
    assert facts["mtp"]["dropped"] == ["mtp.layers.0.mlp.gate.weight"]


def test_a_speculating_study_keeps_them(facts: dict[str, Any]) -> None:
    found = facts["deepseek's predictor, used"]
    assert found["dropped"] == []
    assert found["used"] == len(facts["deepseek's predictor"]["dropped"])


@pytest.mark.parametrize(("name", "layers"), [("mixtral", (0, 1)), ("qwen3_moe", (0, 1)), ("deepseek", (1,))])
def test_each_token_counts_once_for_each_expert(facts: dict[str, Any], name: str, layers: tuple[int, ...]) -> None:
    """20 tokens, to two experts of each layer that has four; DeepSeek's first layer is dense."""
    found = facts["experts"][name]
    assert found["sums"] == {f"model.layers.{layer}.mlp.experts": 20 * 2 for layer in layers}
    assert found["said"]["count"] == 4 * len(layers)


def test_a_model_without_routers_is_unknown(facts: dict[str, Any]) -> None:
    assert facts["experts"]["dense"] == {"unknown": "its routers do not say where they send a token"}


def test_artifacts_leave_the_models_buffers_out(
    torch_python: Path, run_program: Callable, call: Callable, tmp_path: Path
) -> None:
    """The demo with a buffer in each of its seven layers, as libraries wrote it until 2023."""
    demo = shards.find(REPO / "demo")
    names = [f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in range(7)]
    model = tmp_path / "model"
    model.mkdir()
    for path in demo.others():
        shutil.copy(path, model)
    buffers = {name: replace(write_tensor(tmp_path / name, bytes(128), "F32", 32), name=name) for name in names}
    safetensors_file.write(model / "model.safetensors", [*demo.tensors().values(), *buffers.values()])
    source, tensors = tmp_path / "source", tmp_path / "tensors.json"
    for result in (
        run_program("fetch.link", model, source),
        call(torch_python, "scripts/quantmill", "fetch.name_tensors", source, tensors),
        run_program("checkpoint.to_safetensors", source, tmp_path / "safetensors", "--tensors", tensors),
        run_program("build.fp16", tmp_path / "safetensors", tmp_path / "fp16"),
    ):
        assert result.returncode == 0, result.stderr
    for name in ("safetensors", "fp16"):
        assert shards.find(tmp_path / name).tensors().keys() == demo.tensors().keys()
        found = json.loads((tmp_path / name / "quantmill.json").read_text())
        assert sorted(found["source"]["dropped"]) == names
        assert found["parameter_count"] == sum(tensor.numel for tensor in demo.tensors().values())
    # weights that came after the list was made
    (source / "model.safetensors").unlink()
    safetensors_file.write(source / "model.safetensors", demo.tensors().values())
    result = run_program("checkpoint.to_safetensors", source, tmp_path / "again", "--tensors", tensors)
    assert "tensors.json: was made from other weights; delete it and run again" in result.stderr


@pytest.mark.parametrize("name", shards.ADAPTERS)
def test_an_adapter_beside_a_model_is_refused(run_program: Callable, tmp_path: Path, name: str) -> None:
    """Only with peft installed would transformers add it to the model."""
    model = shutil.copytree(REPO / "demo", tmp_path / "model")
    (model / name).write_bytes(b"weights")
    result = run_program("fetch.link", model, tmp_path / "source")
    assert f"{model / name}: is an adapter next to a model; merge it into" in result.stderr
    assert not (tmp_path / "source").exists()
    files = ["config.json", "model.safetensors", name]
    with pytest.raises(UserError, match=f"someone/model: holds {name}, an adapter; name a repository"):
        select("someone/model", files)


def test_a_run_may_speculate_with_the_models_layers() -> None:
    own = {"engine": "vllm", "options": {"speculative_config": {"method": "deepseek_mtp"}}}
    other = {"engine": "vllm", "options": {"speculative_config": {"method": "ngram"}}}
    assert [
        vllm_parallelism.speculates_by_itself(run) for run in (own, other, {"engine": "ctranslate2", "options": {}})
    ] == [True, False, False]


def test_towers_stay_beside(facts: dict[str, Any]) -> None:
    assert facts["a tower"] == {
        "used": 0,
        "all": True,
        "beside": ["model.visual.blocks.0.attn.qkv.weight"],
        "dropped": [],
    }
