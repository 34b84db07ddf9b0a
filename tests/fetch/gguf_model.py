"""GGUF files of a small model, with whatever a test changes."""

import struct
from math import prod
from pathlib import Path
from typing import Any

from forge import gguf_array, gguf_key, gguf_tensor, gguf_text, gguf_texts, gguf_with

WIDTH, INNER, VOCABULARY = 64, 32, 5
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1, "▁c": 2}}, "added_tokens": [{"id": 3, "content": "<|▁d|>"}]}
KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 7,
    "quantize.imatrix.dataset": "calibration.txt",
    "llama.block_count": 1,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a", "b", "▁c", "<| d|>", "[PAD4]"],
    "tokenizer.ggml.scores": [0.0] * VOCABULARY,
    "tokenizer.ggml.token_type": [1] * VOCABULARY,
    "tokenizer.chat_template": "{{ x }}",
}
F32, Q8_0 = (0, 4, 1), (8, 34, 32)  # number, bytes, and the weights in them
TENSORS: dict[str, tuple] = {
    "token_embd.weight": ((WIDTH, VOCABULARY), Q8_0),
    "blk.0.ffn_up.weight": ((WIDTH, INNER), Q8_0),
    "output_norm.weight": ((WIDTH,), F32),
}


def encode(key: str, value: Any) -> bytes:
    """Encode a key of GGUF with a value: int and float in 32 bits."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        return gguf_texts(key, *value)
    if isinstance(value, list):
        kind, layout = (6, "<f") if value and isinstance(value[0], float) else (5, "<i")
        return gguf_array(key, kind, *(struct.pack(layout, each) for each in value))
    if isinstance(value, str):
        return gguf_key(key, 8, gguf_text(value))
    return gguf_key(key, 6, struct.pack("<f", value)) if isinstance(value, float) else gguf_key(key, *number(value))


def number(value: int) -> tuple[int, bytes]:
    return (4, struct.pack("<I", value)) if value < 2**32 else (10, struct.pack("<Q", value))


def write(path: Path, keys: dict[str, Any] | None = None, *names: str, more: tuple[bytes, ...] = ()) -> Path:
    """Write a GGUF file of this model, with the tensors of these names or all; a key that is None is left out."""
    said = {key: value for key, value in (KEYS | (keys or {})).items() if value is not None}
    stored, data = [], b""
    for name in names or TENSORS:
        dimensions, (kind, nbytes, block) = TENSORS[name]
        stored.append(gguf_tensor(name, dimensions, kind, len(data)))
        size = prod(dimensions) * nbytes // block
        data += bytes(size + -size % 32)
    return gguf_with(path, (*more, *(encode(*pair) for pair in said.items())), tuple(stored), data)


def write_parts(folder: Path) -> list[Path]:
    """Write the same in two files."""
    paths = []
    for part, names in enumerate((["token_embd.weight", "blk.0.ffn_up.weight"], ["output_norm.weight"])):
        said = gguf_key("split.no", 2, struct.pack("<H", part)), gguf_key("split.count", 2, struct.pack("<H", 2))
        said += (gguf_key("split.tensors.count", 5, struct.pack("<i", 3)),)
        paths.append(write(folder / f"this-0000{part + 1}-of-00002.gguf", None, *names, more=said))
    return paths
