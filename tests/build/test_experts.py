"""Mixtures whose experts are one tensor in transformers 5: quantized, or refused by name; and what they saw."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, interpreter

from quantmill.build.quantizer import experts
from quantmill.checkpoint.tensor import Tensor, row_major
from quantmill.common.program import UserError

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:]]
LAST, UNREACHED = "model.layers.1.mlp.experts", 2
TOKENS = 4 * 128  # four samples


@pytest.fixture(scope="module")
def build(call: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return a function that builds formats of a family in an environment, once."""
    kept: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(env: str, family: str, *formats: str) -> dict[str, Any]:
        if (env, family) not in kept:
            checks, folder = REPO / "tests/build/mixture_checks.py", tmp_path_factory.mktemp(family)
            result = call(interpreter(env), checks, folder, family, *formats)
            assert result.returncode == 0, result.stderr
            kept[env, family] = json.loads(result.stdout.splitlines()[-1])
        return kept[env, family]

    return run


def of_quantizers(build: Callable, family: str) -> dict[str, Any]:
    more = ["ct-w4a16 planted"] if family == FAMILIES[0] else []
    # AutoRound first: HQQ's program leaves gradients off in its process
    return build("quantizers", family, "autoround-int4", "bnb-nf4", "torchao-int8", "hqq-int4", "ct-w4a16", *more)


def test_experts_that_calibration_never_reaches_are_named(build: Callable) -> None:
    """A mixture as Mixtral's names have it, of whose second layer's router sends no token to the third expert."""
    found = build("gptqmodel", "mixtral", "gptq-int4")["gptq-int4"]
    said = found["experts"]
    assert (said["count"], said["few"], said["all_tokens"]) == (2 * 4, 64, False)
    assert f"{LAST}.{UNREACHED}" in said["unreached"]
    assert sum(said["tokens"][LAST]) == 2 * TOKENS  # two experts for each
    assert said["tokens"][LAST][UNREACHED] == 0
    assert said["below"] == sum(count < 64 for counts in said["tokens"].values() for count in counts)
    assert found["gate"]["faithful"]["against"] == "its own weights"
    assert found["gate"]["faithful"]["divergence"] < found["gate"]["faithful"]["tolerance"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", ["gptq-int4", "awq-int4"])
def test_gptqmodel_quantizes_experts(build: Callable, family: str, format: str) -> None:
    """All but AWQ of DeepSeek-V3, whose latent attention gptqmodel takes for several layers of one input."""
    found = build("gptqmodel", family, "gptq-int4", "awq-int4")[format]
    if (family, format) == ("deepseek_v3", "awq-int4"):
        assert "gptqmodel cannot quantize it" in found["error"] and not found["published"]
        return
    assert found["error"] == ""
    assert {"qweight I32", "qzeros I32", "scales F16"} <= {*found["dtypes"]}
    assert not any(name.startswith("weight ") for name in found["dtypes"])
    assert found["gate"]["faithful"]["divergence"] < found["gate"]["faithful"]["tolerance"]


@pytest.mark.parametrize("family", [FAMILIES[0], *SLOW])
@pytest.mark.parametrize(
    ("format", "tool"), [("bnb-nf4", "bitsandbytes"), ("torchao-int8", "torchao"), ("hqq-int4", "hqq")]
)
def test_tools_that_pass_over_experts_are_refused(build: Callable, family: str, format: str, tool: str) -> None:
    """Their artifacts would be called 4 or 8 bits, with most weights in 16."""
    found = of_quantizers(build, family)[format]
    assert f": {tool} " in found["error"] and "does not quantize this model's experts: model.layers." in found["error"]
    assert found["error"].endswith("leave this format out for this model")
    assert not found["published"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_autoround_quantizes_experts(build: Callable, family: str) -> None:
    found = of_quantizers(build, family)["autoround-int4"]
    if family == "gpt_oss":
        assert "AutoRound stores gate and up of each expert, and gptqmodel" in found["error"]
        assert not found["published"]
        return
    assert {"qweight I32", "qzeros I32", "scales F16"} <= {*found["dtypes"]}


@pytest.mark.parametrize("family", [FAMILIES[0], *SLOW])
def test_llm_compressor_quantizes_experts(build: Callable, family: str) -> None:
    found = of_quantizers(build, family)["ct-w4a16"]
    if family == "gpt_oss":  # which has one tensor for all of them on the disk, too
        assert "llm-compressor stores experts one by one, and transformers" in found["error"]
        assert not found["published"]
        return
    assert {"weight_packed I32", "weight_scale F16"} <= {*found["dtypes"]}
    assert not any(name.startswith("weight ") for name in found["dtypes"])
    assert found["experts"]["all_tokens"] is True
    assert sum(found["experts"]["tokens"][LAST]) == 2 * TOKENS


def test_nan_in_an_experts_scales_is_found_twice(build: Callable) -> None:
    """By the builder, and by the gate in an artifact that is there already."""
    found = of_quantizers(build, FAMILIES[0])["ct-w4a16 planted"]
    name = found["named"]
    assert name.startswith(f"{LAST}.3.") and name.endswith(".weight_scale")
    assert f"made {name} NaN or infinite at [0, 0]; leave this format out" in found["error"]
    assert f"{name.removesuffix('_scale')} is NaN or infinite at [0, 0]" in found["gate"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gguf_mixed_chooses_types_of_experts(
    call: Callable, torch_python: Path, run_gguf: Callable, tmp_path: Path, family: str
) -> None:
    """llama.cpp's own tools, and transformers' model with a layer's experts in one tensor; gpt-oss's is transposed."""
    prepared = call(torch_python, REPO / "tests/build/mixture_checks.py", tmp_path, family)
    assert prepared.returncode == 0, prepared.stderr
    ids = {"calibration": tmp_path / "calibration.json", "evaluation": tmp_path / "evaluation.json"}
    base, matrix, found = tmp_path / "gguf-f16", tmp_path / "imatrix", tmp_path / "sensitivity.json"
    run = {"device": "cpu", "threads": 1}
    imatrix = {"text": tmp_path / "calibration.txt", "samples": 4, "sequence-length": 128, **ids}
    first = {"parameters": '{"type": "f16"}', "evaluation": ids["evaluation"], "text": tmp_path / "evaluation.txt"}
    mixed = {"parameters": '{"size": "q4_k_m"}', "base": base, "imatrix": matrix, "sensitivity": found}
    for program, source, out, words in (
        ("build.gguf", tmp_path / "safetensors", base, first),
        ("build.imatrix", base, matrix, imatrix),
        ("build.gguf_sensitivity", tmp_path / "safetensors", found, {"base": base, "imatrix": matrix, **ids}),
        ("build.gguf", tmp_path / "safetensors", tmp_path / "gguf-mixed", mixed),
    ):
        options = [part for name, value in (words | run).items() for part in (f"--{name}", value)]
        result = run_gguf(program, source, out, *options)
        assert result.returncode == 0, result.stderr
    said = json.loads((tmp_path / "gguf-mixed/quantmill.json").read_text())["experts"]
    assert f"blk.1.ffn_up_exps.weight.{UNREACHED}" in said["unreached"]
    assert [sum(counts) for counts in said["tokens"].values()] == [2 * TOKENS] * 2
    assert said["few"] == 64
    stacks = {f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 1) for part in ("gate", "up", "down")}
    losses = json.loads(found.read_text())["tensors"]
    assert stacks <= losses.keys() and all(losses[name]["IQ4_NL"]["kld"] > 0 for name in stacks)
    types = dict(line.split("=") for line in (tmp_path / "gguf-mixed/tensor-types.txt").read_text().splitlines())
    assert {name.replace(".", chr(92) + ".") for name in stacks} <= {name.strip("^$") for name in types}


def stored(name: str, dtype: str, *shape: int) -> Tensor:
    return Tensor(name, dtype, shape, row_major(shape), Path("m"), 0)


@pytest.mark.parametrize(
    "kept",
    [
        stored("model.layers.0.mlp.experts.3.up_proj.weight", "F16", 8, 8),
        stored("model.layers.0.mlp.experts.gate_up_proj", "BF16", 4, 8, 16),
        stored("language_model.model.layers.0.feed_forward.experts.down_proj", "F32", 4, 8, 8),  # Llama 4
        stored("model.layers.0.block_sparse_moe.input_linear.weight", "F16", 4, 8, 8),  # Granite
    ],
    ids=lambda tensor: tensor.name,
)
def test_experts_in_full_are_refused(kept: Tensor) -> None:
    other = stored("model.layers.0.self_attn.q_proj.qweight", "I32", 8, 8)
    with pytest.raises(UserError, match=rf"^m: tool 1 does not quantize this model's experts: {kept.name} would stay"):
        experts.check_quantized("tool 1", [other, kept], Path("m"))


def test_what_belongs_to_quantized_experts_is_not_refused() -> None:
    place = "model.layers.0.mlp.experts.3.up_proj"
    parts = [stored(f"{place}.weight", "U8", 8, 8), stored(f"{place}.weight", "F8_E4M3", 8, 8)]
    parts += [stored(f"{place}.weight_scale", "F16", 8, 1), stored(f"{place}.bias", "F16", 8)]
    parts += [stored("model.layers.0.mlp.experts.gate_up_proj_bias", "F16", 4, 16)]
    parts += [stored("model.layers.0.mlp.shared_experts.up_proj.weight", "F16", 8, 8)]
    experts.check_quantized("tool 1", parts, Path("m"))


def test_counts_say_which_experts_saw_few() -> None:
    said = experts.facts({"a": [0, 7, 8], "b": [9, 0, 100]}, 8)
    assert said == {
        "count": 6,
        "few": 8,
        "below": 3,
        "unreached": ["a.0", "b.1"],
        "tokens": {"a": [0, 7, 8], "b": [9, 0, 100]},
    }
