"""Parts of checkpoints other than plain weights: towers, tables, experts, masks. Sizes known by hand."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO
from weight_files import save_file

from quantmill import layouts
from quantmill.checkpoint import ctranslate2_bin, shards
from quantmill.checkpoint.ctranslate2_bin import Variable
from quantmill.common import special_tokens
from quantmill.common.program import UserError
from quantmill.layouts.write_model import write_model
from quantmill.servers import vllm_settings

MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2}


def checkpoint(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "config", "read"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", {"moe_num_experts": 8, "moe_k": 2}, 10),  # ERNIE 4.5
        ("model.layers.0.mlp.experts.3.up_proj.weight", {"n_routed_experts": 8, "moe_topk": 1}, 5),  # LongCat
        ("model.layers.0.block_sparse_moe.input_linear.weight", MIXTURE, 10),  # Granite
        ("model.layers.0.block_sparse_moe.router.layer.weight", MIXTURE, 40),
        ("model.vision_tower.blocks.0.mlp.weight", {}, 0),  # Gemma 3
        ("model.multi_modal_projector.linear_1.weight", {}, 0),
        ("model.language_model.embed_tokens_per_layer.weight", {}, 0),  # Gemma 3n: a row
    ],
)
def test_a_token_of_a_text_reads(name: str, config: dict[str, Any], read: int) -> None:
    assert shards.bytes_read({"model.embed_tokens.weight": 50, name: 40}, config) == 50 + read


@pytest.mark.parametrize(
    ("others", "config", "read"),
    [
        ({}, {}, 70),  # the table is the head, and is read whole
        ({"lm_head.weight": 50}, {"tie_word_embeddings": False}, 70),
        ({"lm_head.qweight": 10, "lm_head.scales": 2}, {}, 32),
        ({"model.layers.0.mlp.experts.3.up_proj.weight": 40, "lm_head.weight": 50}, {}, 110),
        (
            {"model.layers.0.mlp.experts.3.up_proj.weight": 40, "lm_head.weight": 50},
            {"num_local_experts": 8, "num_experts_per_tok": 2},
            80,
        ),
    ],
)
@pytest.mark.parametrize("table", ["model.embed_tokens.weight", "transformer.wte.weight"])
def test_a_token_reads_a_row_and_its_experts(
    table: str, others: dict[str, int], config: dict[str, Any], read: int
) -> None:
    assert shards.bytes_read({table: 50, "model.layers.0.self_attn.q_proj.weight": 20} | others, config) == read


def test_the_head_and_experts_of_llama_4(tmp_path: Path) -> None:
    """Llama 4: its config keeps the experts in text_config, and its tensors are called language_model."""
    tensors = {
        "language_model.model.embed_tokens.weight": np.ones((10, 4), np.float16),
        "language_model.model.layers.0.feed_forward.experts.up_proj": np.ones((8, 4, 4), np.float16),
        "language_model.lm_head.weight": np.ones((10, 4), np.float16),
        "vision_model.patch_embedding.weight": np.ones((100, 4), np.float16),
    }
    folder = checkpoint(tmp_path / "m", tensors, {"text_config": MIXTURE | {"vocab_size": 10}})
    assert shards.bytes_per_token(folder) == 2 * (10 * 4 + 2 * 4 * 4)
    assert shards.text_parameters(folder) == 10 * 4 + 8 * 4 * 4 + 10 * 4


def model_with_masks(folder: Path, constant: np.ndarray) -> Path:
    """GPT-NeoX's, as it was published: a mask and a constant next to the weights."""
    tensors = {
        "gpt_neox.embed_in.weight": np.ones((10, 4), np.float16),
        "gpt_neox.layers.0.attention.bias": np.ones((1, 1, 16, 16), np.uint8),
        "gpt_neox.layers.0.attention.masked_bias": constant,
        "transformer.h.0.attn.bias": np.full((1, 1, 16, 16), -np.inf, np.float32),
        "embed_out.weight": np.ones((10, 4), np.float16),
    }
    return checkpoint(folder, tensors, {"architectures": ["GPTNeoXForCausalLM"]})


def test_masks_do_not_count_as_weights(tmp_path: Path, run_program: Callable) -> None:
    """They are neither counted, nor do their infinities refuse the model."""
    source = model_with_masks(tmp_path / "m", np.array(-np.inf, np.float16))
    out = tmp_path / "out"
    result = run_program("checkpoint.to_safetensors", source, out, "--verify", "--finite")
    assert result.returncode == 0, result.stderr
    assert json.loads((out / "quantmill.json").read_text())["parameter_count"] == 2 * 10 * 4


def test_a_large_constant_leaves_weights_in_float16(tmp_path: Path, run_program: Callable) -> None:
    source = model_with_masks(tmp_path / "m", np.array(-1e9, np.float32))
    out = tmp_path / "out"
    assert run_program("checkpoint.to_safetensors", source, out, "--finite").returncode == 0
    result = run_program("build.fp16", out, tmp_path / "fp16")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "fp16/config.json").read_text())["dtype"] == "float16"


def test_a_weight_beyond_float16_stays_float32(tmp_path: Path) -> None:
    large = np.array([[1, 70_000], [2, 3]], np.float32)
    tensors = {"model.layers.0.mlp.up_proj.weight": large, "model.norm.weight": np.ones(2, np.float32)}
    source = shards.find(checkpoint(tmp_path / "m", tensors, {}))
    write_model(tmp_path / "run", source, layouts.array, "F16")
    run = shards.find(tmp_path / "run").tensors()
    assert {name: tensor.dtype for name, tensor in run.items()} == dict(zip(tensors, ("F32", "F16"), strict=True))
    assert (layouts.array(run["model.layers.0.mlp.up_proj.weight"]) == large).all()


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"eos_token_id": 2, "vocab_size": 10}, [2]),
        ({"eos_token_id": [2, 12], "text_config": {"vocab_size": 10}}, [2]),
        ({"text_config": {"eos_token_id": [1, 9], "vocab_size": 10}}, [1, 9]),
        ({"vocab_size": 10}, []),
    ],
)
def test_ends_of_a_config(config: dict[str, Any], ends: list[int]) -> None:
    assert special_tokens.ends(config) == ends


def test_vllm_has_room_for_a_windows_last_target(tmp_path: Path) -> None:
    """It wants one token more than a prompt has."""
    for config in ({"max_position_embeddings": 1024}, {"text_config": {"max_position_embeddings": 1024}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert vllm_settings.settings(tmp_path, {}, 0)["max_model_len"] == 1024 + 2


MATRIX, SCALE, NORM = "decoder/layer_0/self_attention/linear_0/weight", "…/weight_scale", "…/layer_norm/gamma"


@pytest.mark.parametrize(
    ("stored", "compute_type", "read"),
    [
        ("int8", None, 8 + 4 * 2 + 4 * 4),
        ("int8", "int8_float32", 8 + 4 * 2 + 4 * 4),
        ("int8", "float32", 4 * 8 + 4 * 2 + 4 * 4),
        ("int8", "float16", 2 * 8 + 2 * 2 + 2 * 4),
        ("float16", "int8", 8 + 4 * 2 + 4 * 4),
        ("float16", "int8_bfloat16", 8 + 2 * 2 + 2 * 4),
        ("float16", "float32", 4 * 8 + 4 * 2 + 4 * 4),
    ],
)
def test_ctranslate2_turns_weights_into_what_it_multiplies(stored: str, compute_type: str | None, read: int) -> None:
    """A matrix of eight, two scales and four others, and a table of which a token reads a row."""
    width = {"int8": 1, "float16": 2}[stored]
    variables = {
        MATRIX: Variable(stored, (2, 4), 0, 8 * width),
        SCALE: Variable("float32", (2,), 0, 8),
        NORM: Variable("float32", (4,), 0, 16),
        "decoder/embeddings/weight": Variable(stored, (100, 4), 0, 400 * width),
        ctranslate2_bin.HEAD: Variable("int32", (), 0, 0),
    }
    assert ctranslate2_bin.bytes_per_token(variables, compute_type) == read


def test_a_file_that_claims_too_many_variables(tmp_path: Path) -> None:
    name = b"TransformerDecoderModelSpec\0"
    head = struct.pack(f"<IH{len(name)}s", ctranslate2_bin.VERSION, len(name), name)
    for count, said in ((10**9, "claims 1000000000 variables"), (2, "cut off")):
        (tmp_path / "model.bin").write_bytes(head + struct.pack("<II", 7, count))
        with pytest.raises(UserError, match=said):
            ctranslate2_bin.read(tmp_path / "model.bin")


def test_ctranslate2_chooses_no_end_of_a_model(demo: Path, torch_python: Path, call: Callable) -> None:
    """Its own config.json knows one. The other is the token that it would choose first."""
    lines = f"""
import json, shutil, sys, tempfile
from quantmill import engines
from pathlib import Path

def first(folder):
    return [token for _, token, _ in engines.load("ctranslate2", folder, "cpu", 1).decode([[5, 6, 7]], 20)]

with tempfile.TemporaryDirectory() as temporary:
    folder = Path(shutil.copytree("{demo}/artifacts/demo/ct2-float32", temporary + "/a"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    chosen = first(folder)
    (folder / "generation_config.json").write_text(json.dumps({{"eos_token_id": [2, chosen[0], 10**6]}}))
    print(json.dumps([chosen, first(folder)]))
"""
    result = call(torch_python, "-c", lines, cwd=REPO / "scripts")
    assert result.returncode == 0, result.stderr
    before, after = json.loads(result.stdout)
    assert before[0] not in after
    assert len(after) == 20
