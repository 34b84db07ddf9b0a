"""mlc-chat-config.json, which MLC-LLM's engine reads with the weights.

Keys, their order and their defaults are those of MLC-LLM (interface/gen_config.py, protocol/mlc_chat_config.py,
model/*/*_model.py, cpp/tokenizers/tokenizers.cc).
"""

import json
from pathlib import Path
from typing import Any

from quantmill.checkpoint.shards import read_json
from quantmill.mlc.source_config import SourceConfig

NAME = "mlc-chat-config.json"
PARALLEL = {"tensor_parallel_shards": 1, "pipeline_parallel_stages": 1}
TEMPLATE = "LM"  # no chat: the text is not changed
TOKENIZER_FILES = (
    *("tokenizer.model", "tokenizer.json", "vocab.json", "merges.txt"),
    *("added_tokens.json", "tokenizer_config.json"),
)
MAX_TOKENIZER = 64 * 2**20  # bytes; that of 250,000 tokens has 35 MB
MAX_TOKENIZER_VALUES = 4_000_000  # and 2 million values
# taken from generation_config.json, else from config.json, else these
SAMPLING = {"temperature": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
SAMPLING |= {"top_p": 1.0}
# keys of a model's config.json that its `model_config` begins with
COPIED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("rms_norm_eps", "vocab_size", "tie_word_embeddings"),
)
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model_config(config: SourceConfig) -> dict[str, Any]:
    """Return the `model_config` of a model: the keys of MLC-LLM's Llama, and those that other families add."""
    family = config.family
    content: dict[str, Any] = {
        **{name: getattr(config, name) for name in COPIED},
        "position_embedding_base": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "context_window_size": config.context,
        "prefill_chunk_size": min(config.context, family.max_prefill),
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        **PARALLEL,
        "max_batch_size": 128,
        "disaggregation": False,
    }
    if family.model_type == "mistral":
        content |= {"sliding_window_size": -1, "attention_sink_size": family.attention_sink}
    if family.model_type == "qwen2":
        content |= {"hidden_act": "silu", "rope_theta": config.rope_theta, "dtype": "float32"}
    return content


def chat_config(source: Path, config: SourceConfig, quantization: str) -> dict[str, Any]:
    """Return the file's content for the model in folder `source`. Raises `UserError` for damaged JSON."""
    generation = source / "generation_config.json"
    given = {
        **_select_keys(read_json(source / "config.json")),
        **(_select_keys(read_json(generation)) if generation.is_file() else {}),
    }
    tokenizer = source / "tokenizer.json"
    tokens = read_json(tokenizer, MAX_TOKENIZER, MAX_TOKENIZER_VALUES) if tokenizer.is_file() else {}
    settings = SAMPLING | TOKENS | given
    model = model_config(config)
    return {
        "version": "0.1.0",
        "model_type": config.family.model_type,
        "quantization": quantization,
        "model_config": model,
        "vocab_size": config.vocab_size,
        "context_window_size": config.context,
        "sliding_window_size": -1,
        "prefill_chunk_size": model["prefill_chunk_size"],
        "attention_sink_size": config.family.attention_sink,
        **PARALLEL,
        "active_vocab_size": vocabulary_size(tokens) or config.vocab_size,
        **{key: settings[key] for key in SAMPLING},
        "tokenizer_files": [name for name in TOKENIZER_FILES if (source / name).is_file()],
        "tokenizer_info": tokenizer_info(tokens),
        "conv_template": conversation(settings["bos_token_id"], settings["eos_token_id"]),
        **{key: settings[key] for key in TOKENS},
        "model_task": "chat",
        "embedding_metadata": None,
    }


def write(folder: Path, source: Path, config: SourceConfig, quantization: str) -> None:
    """Write the file of the model in folder `source` to `folder`."""
    with (folder / NAME).open("w", encoding="utf-8") as file:
        json.dump(chat_config(source, config, quantization), file, indent=2)


def conversation(bos: int, eos: int | list[int]) -> dict[str, Any]:
    """Return MLC-LLM's template `LM`, with the model's tokens instead of Llama 2's."""
    return {
        "name": TEMPLATE,
        "system_template": "{system_message}",
        "system_message": "",
        "system_prefix_token_ids": [bos],
        "add_role_after_system_message": True,
        "roles": {"user": "", "assistant": ""},
        "role_templates": {"user": "{user_message}", "assistant": "{assistant_message}", "tool": "{tool_message}"},
        "messages": [],
        "seps": [""],
        "role_content_sep": "",
        "role_empty_sep": "",
        "stop_str": [],
        "stop_token_ids": eos if isinstance(eos, list) else [eos],
        "function_string": "",
        "use_function_calling": False,
    }


def tokenizer_info(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return MLC-LLM's facts about a tokenizer.json (Tokenizer::DetectTokenizerInfo); its defaults for `{}`."""
    decoders = _steps(tokenizer.get("decoder"), "decoders")
    kinds = [step.get("type") for step in decoders if step.get("type") in ("ByteLevel", "ByteFallback")]
    return {
        "token_postproc_method": "byte_level" if kinds[-1:] == ["ByteLevel"] else "byte_fallback",
        "prepend_space_in_encode": any(
            (step.get("type"), step.get("prepend")) == ("Prepend", "▁")
            for step in _steps(tokenizer.get("normalizer"), "normalizers")
        ),
        "strip_space_in_decode": any(
            [step.get(key) for key in ("type", "content", "start", "stop")] == ["Strip", " ", 1, 0] for step in decoders
        ),
    }


def vocabulary_size(tokenizer: dict[str, Any]) -> int:
    """Count the tokens of a tokenizer.json, with added ones; 0 if it has none."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        names = set(vocabulary)
    elif isinstance(vocabulary, list):  # of a unigram model: [token, score] pairs
        names = {entry[0] for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str)}
    else:
        names = set()
    added = tokenizer.get("added_tokens")
    added = added if isinstance(added, list) else []
    return len(names | {entry["content"] for entry in added if isinstance(entry, dict) and "content" in entry})


def _select_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that are kept. Ids that are not numbers are dropped: MLC-LLM would refuse the whole file."""
    return {
        key: value
        for key, value in config.items()
        if (key in SAMPLING and value is not None) or (key in TOKENS and _is_id(key, value))
    }


def _is_id(key: str, value: Any) -> bool:
    """Return whether a value is a token's id, or a list of ids for a key that may have several."""
    ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
    return bool(ids) and all(type(token) is int for token in ids)


def _steps(step: Any, members: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a decoder, which may be a sequence of them."""
    steps = step.get(members) if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    return [each for each in steps if isinstance(each, dict)] if isinstance(steps, list) else []
