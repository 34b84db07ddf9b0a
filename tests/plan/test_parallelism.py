"""Cards and speculation of vLLM are checked at parse time: one line each, with the model, the number and what fits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO

from quantmill.plan.config import complete
from quantmill.plan.config_values import ConfigError
from quantmill.plan.registry import LAYOUTS, Engine, Format, Registry

SCHEMA = yaml.safe_load((REPO / "config/config.schema.yaml").read_text())
FORMATS = {
    "fp16": Format("hf", "transformers", "torch", "build.fp16"),
    "gptq-int4": Format("gptq", "transformers", "torch", "build.gptq", config="gptq"),
    "awq-int4": Format("awq", "transformers", "torch", "build.awq", config="awq"),
}
VLLM = Engine("torch", ("hf", "gptq", "awq"), multi_gpu=True, options=None, serves=True)
ENGINES = {"transformers": Engine("torch", ("hf", "gptq", "awq")), "vllm": VLLM, "vllm-serve": VLLM}
REGISTRY = Registry(FORMATS, ENGINES, LAYOUTS, ["torch"])
# 12 heads: 1, 2, 3, 4, 6, 12 divide them; 4 key-value heads: of these 1, 2, 4 divide them, and 12 is divided by them
MODEL = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 5}
MODEL |= {"hidden_size": 768, "intermediate_size": 2304}  # 2304 = 18 x 128 = 36 x 64; 768 = 6 x 128 = 12 x 64


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "demo"):
        (tmp_path / name).symlink_to(REPO / name)
    for name in ("model", "small", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MODEL))
        (tmp_path / name / "model.safetensors").write_text("")
    theirs = MODEL | {"quantization_config": {"group_size": 64}}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(theirs))
    monkeypatch.chdir(tmp_path)


def check(
    options: dict[str, Any], gpus: int = 1, format: str = "fp16", registry: Registry = REGISTRY, **changes: Any
) -> dict[str, Any]:
    models = {"m": {"source": {"path": "model"}, "prebuilt": {"theirs": {"layout": "gptq", "path": "theirs"}}}}
    run = {"engine": "vllm-serve", "formats": [format], "options": options, "gpus": gpus}
    config = {"models": models, "formats": list(FORMATS), "runs": {"x": run}} | changes
    return complete(config, SCHEMA, registry)


def refusal(*arguments: Any, **words: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*arguments, **words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({}, 1),
        ({}, 4),  # tensor parallel over all
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
        ({"pipeline-parallel-size": 5}, 5),
        ({"pipeline_parallel": 2, "data-parallel-size": 3}, 6),
        ({"tensor-par": 12}, 12),  # 12 parts share 4 key-value heads
    ],
)
def test_sizes_that_fit(options: dict[str, Any], gpus: int) -> None:
    assert check(options, gpus)["runs"]["x"]["gpus"] == gpus


@pytest.mark.parametrize(
    ("options", "gpus", "message"),
    [
        ({"tensor_parallel_size": 2}, 1, "tensor_parallel_size 2 takes 2 GPUs, and gpus is 1; set gpus: 2"),
        ({"data-parallel-size": 2}, 1, "data_parallel_size 2 takes 2 GPUs, and gpus is 1; set gpus: 2"),
        (
            {"tensor-parallel": 2, "pipeline_parallel_size": 2},
            2,
            "tensor_parallel_size 2 x pipeline_parallel_size 2 take 4 GPUs, and gpus is 2; set gpus: 4, or other sizes",
        ),
        (
            {"pipeline_parallel_size": 2},
            3,
            "pipeline_parallel_size 2 takes 2 GPUs, and gpus is 3; set gpus: 2, or other sizes",
        ),
        ({}, 8, "tensor_parallel_size 8 does not fit m's 12 attention heads; sizes that fit: 1, 2, 4, 12"),
        ({}, 3, "tensor_parallel_size 3 does not fit m's 4 key-value heads; sizes that fit: 1, 2, 4, 12"),
        ({"pipeline_parallel_size": 6}, 6, "pipeline_parallel_size 6, and m has 5 layers; 5 fit at most"),
    ],
)
def test_sizes_that_do_not_fit(options: dict[str, Any], gpus: int, message: str) -> None:
    assert refusal(options, gpus) == f"runs.x: {message}"


@pytest.mark.parametrize("size", ["2", 0, 1.5, True])
def test_a_size_is_a_number(size: Any) -> None:
    expected = f"runs.x.options.tensor_parallel_size: {size!r} is not a size; write a whole number of 1 or more"
    assert refusal({"tensor_parallel_size": size}) == expected


GROUPS = "tensor_parallel_size 4 does not fit m's {} in groups of {}; sizes that fit: {}"


@pytest.mark.parametrize(
    ("format", "changes", "what"),
    [
        ("gptq-int4", {}, ("intermediate_size of 2304", 128, "1, 2")),  # the largest group that fits, 128
        ("awq-int4", {"awq": {"q_group_size": 128}}, ("intermediate_size of 2304", 128, "1, 2")),
        ("wide", {"variants": {"wide": {"format": "gptq-int4", "group_size": 128}}, "gptq": {"group_size": 32}}, None),
    ],
)
def test_groups_of_a_quantized_layer(format: str, changes: dict[str, Any], what: tuple[Any, ...] | None) -> None:
    expected = what or ("intermediate_size of 2304", 128, "1, 2")
    assert refusal({}, 4, format, **changes) == f"runs.x: {GROUPS.format(*expected)}"
    assert check({}, 2, format, **changes)


def test_smaller_groups_fit_more_cards() -> None:
    assert check({}, 4, "gptq-int4", gptq={"group_size": 64})  # 2304 / 4 = 576 = 9 x 64, 768 / 4 = 192 = 3 x 64
    assert check({}, 4, "theirs")  # whose own config.json says 64
    expected = "tensor_parallel_size 12 does not fit m's num_attention_heads x head_dim of 768 in groups of 128"
    changed = {"num_key_value_heads": 12, "intermediate_size": 12 * 128}
    Path("model/config.json").write_text(json.dumps(MODEL | changed))
    assert refusal({}, 12, "gptq-int4") == f"runs.x: {expected}; sizes that fit: 1, 2, 3, 6"


def test_what_is_not_known_is_not_checked(tmp_path: Path) -> None:
    hub = {"m": {"source": {"hub": "acme/m"}}}
    assert check({}, 7, models=hub)
    Path("model/config.json").write_text("{")
    assert check({}, 7)
    Path("config.json").write_text(json.dumps({"quantization_config": {"group_size": 999}}))  # of the folder itself
    Path("theirs/config.json").write_text(json.dumps({"quantization_config": [64]}))
    assert check({}, 4, "theirs")
    other = {"engine": "transformers", "formats": ["fp16"], "options": {}}
    assert check({}, runs={"x": other})
    # two sockets of a CPU are no GPUs; what a model is cut into is checked all the same
    here = replace(REGISTRY, device="cpu")
    assert check({"tensor_parallel_size": 2}, registry=here) is not None
    Path("model/config.json").write_text(json.dumps(MODEL))
    assert "12 attention heads" in refusal({"tensor_parallel_size": 5}, registry=here)


def test_random_weights_and_the_demo_have_a_shape() -> None:
    random = {"m": {"source": {"random": "model"}}}
    assert "4 key-value heads" in refusal({}, 6, models=random)
    demo = {"demo": {"source": "demo"}}
    assert "does not fit demo's 4 attention heads; sizes that fit: 1, 2, 4" in refusal({}, 8, models=demo)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "mtp", "model": "model", "num_speculative_tokens": 1}},  # its own layers
        {"speculative_config": {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "unheard of"}},  # vLLM itself refuses it
        {"speculative_config": 3},
    ],
)
def test_speculation_is_left_to_vllm(options: dict[str, Any]) -> None:
    assert check(options)["runs"]["x"]["options"] == options


@pytest.mark.parametrize(
    ("model", "format", "what"),
    [
        ("model", "fp16", "source"),
        ("./small/../model", "fp16", "source"),
        ("artifacts/m/fp16", "fp16", "artifact"),
        ("artifacts/m/safetensors", "gptq-int4", "artifact"),
        ("theirs", "theirs", "artifact"),
    ],
)
def test_a_target_as_its_own_draft(model: str, format: str, what: str) -> None:
    words = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    assert refusal({"speculative_config": words}, format=format) == (
        f"runs.x.options.speculative_config.model: {model} is m's own {what}, a target used as its own draft; name a "
        "smaller model of its family"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"model": "acme/m", "num_speculative_tokens": 2}},
        {"speculative-conf": {"model": "acme/m"}},
        {"speculative_config.method": "draft_model", "speculative-config.model": "acme/m"},
        {"spec_method": "draft_model", "spec-model": "acme/m"},
    ],
)
def test_a_target_of_the_hub_as_its_own_draft(options: dict[str, Any]) -> None:
    message = refusal(options, models={"m": {"source": {"hub": "acme/m"}}})
    assert message.startswith("runs.x.options.speculative_config.model: acme/m is m's own source, a target used as its")
