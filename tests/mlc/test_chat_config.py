"""build.mlc's reading of config.json and tokenizer: the chat config, and refusals by name."""

import json
import math
from pathlib import Path

import pytest
from conftest import REPO
from models import LLAMA, MISTRAL, QWEN2

from quantmill.common.program import UserError
from quantmill.mlc import chat_config, source_config

GOLDEN = REPO / "tests/data/mlc-q4f16_1"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_type": "llama3"}
WITHOUT_ROPE = {key: value for key, value in LLAMA.items() if key != "rope_theta"}


def read(config: dict) -> source_config.SourceConfig:
    return source_config.read(config, Path("m/config.json"))


@pytest.mark.parametrize(
    ("config", "base", "scaling"),
    [
        (WITHOUT_ROPE, 10000, None),
        (LLAMA | {"rope_theta": 500000.0}, 500000.0, None),
        (LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, 500000.0, LLAMA3),
        (WITHOUT_ROPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        (WITHOUT_ROPE | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, LLAMA3),
        (LLAMA | {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 1e4}}, 1e4, LLAMA3),
        (LLAMA | {"rope_scaling": {"type": "default"}}, 10000.0, None),
        (MISTRAL | {"rope_theta": 1e6}, 1e6, None),
        (QWEN2 | {"rope_theta": 1e6}, 1e6, None),
    ],
)
def test_rope_in_every_spelling(config: dict, base: float, scaling: dict | None) -> None:
    written = chat_config.model_config(read(config))
    assert written["position_embedding_base"] == base
    assert written["rope_scaling"] == scaling
    if config["model_type"] == "qwen2":
        assert written["rope_theta"] == base


REFUSED = {
    "architecture 'PhiForCausalLM' is not modelled for MLC, only LlamaForCausalLM": {
        "architectures": ["PhiForCausalLM"]
    },
    "architecture 'MixtralForCausalLM'": {"architectures": ["MixtralForCausalLM"]},
    "architecture None": {"architectures": []},
    "attention_bias True is not modelled for MLC's llama": {"attention_bias": True},
    "mlp_bias True": {"mlp_bias": True},
    "layer_types ['full_attention', 'sliding_attention'] are": {"layer_types": ["full_attention", "sliding_attention"]},
    "quantization_config {'quant_method': 'gptq'}": {"quantization_config": {"quant_method": "gptq"}},
    "auto_map": {"auto_map": {"AutoModelForCausalLM": "own.Model"}},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "rope_scaling of type 'linear'": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_scaling of type 'yarn'": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "rope_scaling of type llama3 lacks low_freq_factor": {
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}
    },
    "rope_parameters differ from rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
    "hidden_size is None, not a size": {"hidden_size": None},
    "num_hidden_layers is 1.5": {"num_hidden_layers": 1.5},
    "do not divide evenly": {"num_key_value_heads": 3},
    "rms_norm_eps is 'x', not a number": {"rms_norm_eps": "x"},
    "rms_norm_eps is nan, not a number": {"rms_norm_eps": math.nan},
    "rope_theta is -1, not a base": {"rope_theta": -1},
    "rope_theta is inf, not a base": {"rope_theta": math.inf},
    "rope_scaling is 'x', not an object": {"rope_scaling": "x"},
}


@pytest.mark.parametrize("message", list(REFUSED))
def test_unsupported_configs_are_refused_by_name(message: str) -> None:
    with pytest.raises(UserError) as error:
        read(LLAMA | REFUSED[message])
    assert str(error.value).startswith("m/config.json: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL | {"sliding_window": 4096}, "sliding_window 4096 is not modelled for MLC's mistral"),
        (MISTRAL | {"tie_word_embeddings": True}, "MLC's mistral has a head of its own"),
        (MISTRAL | {"rope_scaling": LLAMA3}, "rope_scaling 'llama3' is not modelled for MLC's mistral"),
        (QWEN2 | {"use_sliding_window": True}, "use_sliding_window True"),
        (QWEN2 | {"attention_bias": False}, "attention_bias False is not modelled for MLC's qwen2"),
        (QWEN2 | {"head_dim": 32}, "head_dim 32 times 4 heads is not hidden_size 64"),
    ],
)
def test_what_a_family_of_mlcs_lacks_is_refused(config: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(config)


def test_the_whole_chat_config(tmp_path: Path) -> None:
    """By hand: the keys in MLC-LLM's order, generation_config.json before config.json."""
    config = LLAMA | {"rope_theta": 500000.0, "temperature": 0.9, "eos_token_id": 7, "max_position_embeddings": 10000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": null, "eos_token_id": [8, 9]}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<s>": 2}},
        "added_tokens": [{"id": 2, "content": "<s>"}, {"id": 3, "content": "<pad>"}],
        "decoder": {"type": "ByteLevel"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    chat_config.write(tmp_path, tmp_path, read(config), "q4f16_1")
    text = (tmp_path / "mlc-chat-config.json").read_text()
    content = json.loads(text)
    assert text == json.dumps(content, indent=2)
    conversation = content.pop("conv_template")
    assert (conversation["name"], conversation["stop_token_ids"]) == ("LM", [8, 9])
    model = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    model |= {"rms_norm_eps": 1e-5, "vocab_size": 50, "tie_word_embeddings": False, "position_embedding_base": 500000.0}
    model |= {"rope_scaling": None, "context_window_size": 10000, "prefill_chunk_size": 8192, "num_key_value_heads": 2}
    model |= {"head_dim": 16, "tensor_parallel_shards": 1, "pipeline_parallel_stages": 1, "max_batch_size": 128}
    model |= {"disaggregation": False}
    due = {"version": "0.1.0", "model_type": "llama", "quantization": "q4f16_1", "model_config": model}
    due |= {"vocab_size": 50, "context_window_size": 10000, "sliding_window_size": -1, "prefill_chunk_size": 8192}
    due |= {"attention_sink_size": -1, "tensor_parallel_shards": 1, "pipeline_parallel_stages": 1}
    due |= {"active_vocab_size": 4, "temperature": 0.6, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    due |= {"repetition_penalty": 1.0, "top_p": 1.0, "tokenizer_files": ["tokenizer.json", "tokenizer_config.json"]}
    info = {"token_postproc_method": "byte_level", "prepend_space_in_encode": False, "strip_space_in_decode": False}
    due |= {"tokenizer_info": info, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [8, 9]}
    due |= {"model_task": "chat", "embedding_metadata": None}
    assert json.dumps(content) == json.dumps(due)  # in this order


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LLAMA2 = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace"}]},
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, STRIP]},
}


@pytest.mark.parametrize(
    ("tokenizer", "found"),
    [
        (LLAMA2, ("byte_fallback", True, True)),
        ({"decoder": {"type": "ByteLevel"}, "normalizer": {"type": "NFC"}}, ("byte_level", False, False)),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}, "decoder": STRIP}, ("byte_fallback", True, True)),
        ({"normalizer": {"type": "Prepend", "prepend": "_"}, "decoder": STRIP | {"stop": 1}}, ("byte_fallback", 0, 0)),
        ({"decoder": None, "normalizer": None}, ("byte_fallback", False, False)),
        ({"decoder": {"type": "Sequence", "decoders": 3}}, ("byte_fallback", False, False)),
        ({}, ("byte_fallback", False, False)),
    ],
)
def test_tokenizer_info(tokenizer: dict, found: tuple) -> None:
    assert tuple(chat_config.tokenizer_info(tokenizer).values()) == found


def test_vocabulary_of_a_unigram_tokenizer() -> None:
    model = {"vocab": [["a", 0.0], ["b", -1.0]]}
    assert chat_config.vocabulary_size({"model": model, "added_tokens": [{"content": "c"}]}) == 3
    assert chat_config.vocabulary_size({}) == 0
