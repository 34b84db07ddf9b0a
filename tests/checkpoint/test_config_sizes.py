"""Sizes in a config.json that contradict the weights: refused in one line before a library allocates them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MEMORY, REPO
from model_folders import (
    EXPERTS,
    GPT2,
    HIDDEN,
    INNER,
    LAYERS,
    LLAMA,
    MIXTURE,
    VOCAB,
    gpt2,
    llama,
    mixture,
    write,
    zeros,
)

from quantmill.checkpoint import headers, sizes
from quantmill.common.program import UserError

WRONG = {
    "a layer less": ({"num_hidden_layers": LAYERS - 1}, "num_hidden_layers is 2, and its weights have 3 (model.layers"),
    "a layer more": ({"num_hidden_layers": LAYERS + 1}, "num_hidden_layers is 4, and its weights have 3 (model.layers"),
    "a hundred thousand layers": ({"num_hidden_layers": 10**5}, "num_hidden_layers is 100000, which is more than its"),
    "10**9 layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, which is more than its weights"),
    "layers below none": ({"num_hidden_layers": -3}, "num_hidden_layers is -3, where a whole number from 1 on is"),
    "layers under another name": ({"n_layer": 10**7}, "n_layer is 10000000, which is more than its weights can have"),
    "a billion labels": ({"num_labels": 10**9}, "num_labels is 1000000000, which is more than its weights can have"),
    "labels of a part": ({"vision_config": {"num_labels": 10**9}}, "vision_config.num_labels is 1000000000, which"),
    "layers of a part": ({"vision_config": {"num_hidden_layers": 10**9}}, "vision_config.num_hidden_layers is 10000"),
    "layers of a part in a list": ({"parts": [{"depth": 10**9}]}, "depth is 1000000000, which is more than its"),
    "layers of the text": (
        {"model_type": "new", "text_config": {"num_hidden_layers": 2}},
        "num_hidden_layers is 2, and its weights have 3",
    ),
    "head": ({"num_attention_heads": 10**6}, "num_attention_heads is 1000000, which is more than its weights can have"),
    "eight heads as wide as four": ({"num_attention_heads": 8, "head_dim": 4}, "q_proj.weight is [16, 16], and con"),
    "key heads": ({"num_key_value_heads": 4}, "k_proj.weight is [8, 16], and config.json makes it [16, 16]; one of"),
    "a head's width": ({"head_dim": 10**9}, "head_dim is 1000000000, which is more than its weights can have"),
    "an inner width": ({"intermediate_size": INNER + 1}, "gate_proj.weight is [24, 16], and config.json makes it [25,"),
    "width": ({"hidden_size": 2 * HIDDEN}, "is [48, 16], and config.json makes it [48, 32]; one of the two is another"),
    "a billion tokens": ({"vocab_size": 10**9}, "vocab_size is 1000000000, which is more than its weights can have"),
    "more tokens": ({"vocab_size": VOCAB + 1}, "vocab_size is 49, above the 48 rows of model.embed_tokens.weight; res"),
    "fewer tokens": ({"vocab_size": VOCAB - 1}, "vocab_size is 47, below the 48 rows of model.embed_tokens.weight; re"),
    "layers next to those of the text": (
        {"model_type": "new", "num_hidden_layers": 900, "text_config": {"num_hidden_layers": LAYERS}},
        "num_hidden_layers is 900, and its weights have 3",
    ),
    "sizes of a text that is all there is": ({"text_config": {}}, "has a text_config, and a llama reads only text"),
    "a text's vocabulary": (
        {"model_type": "new", "text_config": {"vocab_size": 40}},
        "vocab_size is 40, below the 48 rows of model.embed",
    ),
    "types of tokens": ({"type_vocab_size": 10**12}, "type_vocab_size is 1000000000000, which is more than its weigh"),
    "positions": ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, which is more than"),
    "unknown sizes": ({"memory_slots_dim": 10**11}, "memory_slots_dim is 100000000000, which is more than its weight"),
    "unknown experts": ({"moe": {"shared_experts": [2, 10**8]}}, "moe.shared_experts is 100000000, which is more than"),
    "images": ({"vision_config": {"image_size": 10**9}}, "vision_config.image_size is 1000000000, which is more than"),
    "layers next to shared experts": (
        {"model_type": "deepseek_v2", "n_shared_experts": 2, "num_hidden_layers": 2},
        "num_hidden_layers is 2, and its weights have 3",
    ),
    "a text": ({"num_hidden_layers": "3"}, "num_hidden_layers is '3', where a whole number from 1 on is"),
    "a fraction": ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0, where a whole number from 1 on is"),
    "a yes": ({"vocab_size": True}, "vocab_size is True, where a whole number from 1 on is"),
    "no number": ({"hidden_size": float("nan")}, "hidden_size is nan, where a whole number from 1 on is"),
    "infinity": ({"expert_dim": float("inf")}, "expert_dim is inf, which is more than its weights can have"),
    "a mapping": ({"num_labels": {"a": 1}}, "num_labels is {'a': 1}, where a whole number from 0 on is"),
    "heads of no width": ({"head_dim": 0}, "head_dim is 0, where a whole number from 1 on is"),
    "list for a Llama": ({"intermediate_size": [INNER] * 3}, "intermediate_size is a list, and all layers of a llama"),
    "list of widths": ({"model_type": "new", "hidden_size": [16]}, "hidden_size is [16], where a whole number from 1"),
    "lists in lists": (
        {"model_type": "new", "num_key_value_heads": [[2]]},
        "num_key_value_heads is [2], where a whole number from 1 on is",
    ),
    "a long integer": ({"intermediate_size": 10**400}, "intermediate_size is 100000000000000000000000000000000000"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_size_that_contradicts_the_weights_is_refused(tmp_path: Path, case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(UserError) as refused:
        headers.read(write(tmp_path / "m", LLAMA | changes))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


UNKNOWN = {
    "a new architecture's": {"rope_theta": 10**6, "bos_token_id": 151643, "sliding_window": 131072, "seed": 10**12},
    "lengths that allocate nothing": {"max_position_embeddings": 10_485_760, "model_max_length": 10**30},
    "counts of other things": {"num_training_tokens": 15 * 10**12, "num_params": 7 * 10**9, "max_steps": 10**9},
    "a size of pictures": {"vision_config": {"image_size": 896, "patch_size": 14, "num_hidden_layers": 27}},
    "a width for each layer": {"model_type": "new", "intermediate_size": [INNER] * LAYERS},
    "what is left to the class": {"head_dim": None, "num_key_value_heads": None, "sliding_window": None},
    "a layer counted from the end": {"vision_feature_layer": -2},
    "words and switches": {"time_step_rank": "auto", "output_hidden_states": False, "pruned_heads": {}},
    "limits that are infinite": {"time_step_limit": [0.0, float("inf")]},
    "a padded vocabulary's tokenizer": {"vocab_size": VOCAB, "eos_token_id": [1, 2]},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_keys_of_new_architectures_pass(tmp_path: Path, case: str) -> None:
    assert headers.read(write(tmp_path / "m", LLAMA | UNKNOWN[case])).dropped == ""


def test_a_multi_token_prediction_layer_is_allowed(tmp_path: Path) -> None:
    """DeepSeek V3: num_hidden_layers 61, and a model.layers.61."""
    config = LLAMA | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    headers.read(write(tmp_path / "m", config, llama(LAYERS + 1)))
    with pytest.raises(UserError, match="num_hidden_layers is 3, and its weights have 5"):
        headers.read(write(tmp_path / "m", config, llama(LAYERS + 2)))


def test_a_gap_between_layers_is_refused(tmp_path: Path) -> None:
    tensors = {name: value for name, value in llama().items() if ".layers.1." not in name}
    with pytest.raises(UserError, match="num_hidden_layers is 3, and its weights have 2"):
        headers.read(write(tmp_path / "m", LLAMA, tensors))


def test_sizes_of_text_and_tower_are_distinguished(tmp_path: Path) -> None:
    """Gemma 3: the same words in text_config and vision_config, and names with a part before them."""
    text = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"model_type": "gemma3_text"}
    tensors = {f"language_model.{name}": value for name, value in llama().items()}
    tower = {f"vision_tower.vision_model.encoder.layers.{number}.layer_norm1.weight": (40,) for number in range(5)}
    tower["vision_tower.vision_model.embeddings.position_embedding.weight"] = (4096, 40)
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"num_hidden_layers": 5, "hidden_size": 40}}
    headers.read(write(tmp_path / "m", config, tensors | zeros(tower)))
    for key, value in (("num_hidden_layers", 5), ("vocab_size", 64), ("hidden_size", 40)):
        with pytest.raises(UserError, match=rf"{key} is {value}, |config.json makes it"):
            wrong = config | {"text_config": text | {key: value}}
            headers.read(write(tmp_path / "m", wrong, tensors | zeros(tower)))


@pytest.mark.parametrize("experts", [EXPERTS - 1, EXPERTS + 1, 2 * EXPERTS, 4000, 60_000])
def test_experts_are_those_of_the_weights(tmp_path: Path, experts: int) -> None:
    headers.read(write(tmp_path / "m", MIXTURE, mixture()))
    with pytest.raises(UserError, match=rf"num_local_experts is {experts}, and its weights have {EXPERTS}; correct"):
        headers.read(write(tmp_path / "m", MIXTURE | {"num_local_experts": experts}, mixture()))


def test_a_token_uses_at_most_all_experts(tmp_path: Path) -> None:
    headers.read(write(tmp_path / "m", MIXTURE | {"num_experts_per_tok": EXPERTS}, mixture()))
    with pytest.raises(UserError, match=r"num_experts_per_tok is 5, of 4 experts"):
        headers.read(write(tmp_path / "m", MIXTURE | {"num_experts_per_tok": EXPERTS + 1}, mixture()))


def test_experts_in_one_tensor_are_counted_in_it(tmp_path: Path) -> None:
    config = MIXTURE | {"model_type": "new"}
    stacked = llama() | zeros({"model.layers.0.mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, INNER)})
    headers.read(write(tmp_path / "m", config, stacked))
    with pytest.raises(UserError, match=rf"num_local_experts is 64, and its weights have {EXPERTS}; correct"):
        headers.read(write(tmp_path / "m", config | {"num_local_experts": 64}, stacked))


@pytest.mark.parametrize("positions", [32, 65, 10**6])
def test_each_position_has_a_row(tmp_path: Path, positions: int) -> None:
    headers.read(write(tmp_path / "m", GPT2, gpt2()))
    with pytest.raises(UserError, match=rf"n_positions is {positions}, and wpe\.weight has 64 rows"):
        headers.read(write(tmp_path / "m", GPT2 | {"n_positions": positions}, gpt2()))


def test_a_table_of_positions_may_have_rows_more(tmp_path: Path) -> None:
    """OPT: two rows before the first position."""
    tensors = llama() | zeros({"model.decoder.embed_positions.weight": (66, HIDDEN)})
    headers.read(write(tmp_path / "m", LLAMA | {"model_type": "opt"}, tensors))


def test_a_norm_of_another_length_is_refused(tmp_path: Path) -> None:
    for config, tensors, name in ((LLAMA, llama(), "model.norm.weight"), (GPT2, gpt2(), "h.1.ln_1.weight")):
        with pytest.raises(UserError, match=rf"{name} is \[15\], and config.json makes it \[16\]"):
            headers.read(write(tmp_path / "m", config, tensors | zeros({name: (HIDDEN - 1,)})))


def test_a_config_without_weights_is_bounded() -> None:
    """A config.json alone, for random weights."""
    path = Path("m/config.json")
    for file in sorted((REPO / "config/examples").glob("*.json")):
        sizes.check(path, json.loads(file.read_text()), None)
    for key, value in (("num_hidden_layers", 10**4), ("vocab_size", 10**8), ("num_experts", 10**7), ("head_dim", -1)):
        with pytest.raises(UserError, match=f"{key} is "):
            sizes.check(path, LLAMA | {key: value}, None)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"num_labels": 10**9}], ids=["layers", "labels"])
@pytest.mark.parametrize("program", ["fetch.link", "checkpoint.to_safetensors"])
def test_a_program_refuses_it_before_memory_is_taken(
    run_program: Callable, tmp_path: Path, program: str, change: dict[str, Any]
) -> None:
    folder, out = write(tmp_path / "model", LLAMA | change), tmp_path / "out"
    result = run_program(program, folder, out)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"error: {folder}/config.json: {next(iter(change))} is 1000000000, which is more")
    assert result.memory < MEMORY
    assert not out.exists()


def test_random_weights_are_bounded_by_the_disk(torch_python: Path, call: Callable, tmp_path: Path) -> None:
    """Layers of a width that any one model may have, and of which together no disk has room."""
    free = os.statvfs(tmp_path)
    assert free.f_bavail * free.f_frsize < 2 * 1000 * 4 * 10**6**2
    config = LLAMA | {"hidden_size": 10**6, "num_attention_heads": 100, "num_hidden_layers": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = call(torch_python, "scripts/quantmill", "fetch.random_weights", tmp_path / "config.json", tmp_path / "out")
    assert result.returncode == 1
    assert "config.json: a model of its sizes has " in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
