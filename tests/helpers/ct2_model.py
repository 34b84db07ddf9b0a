"""A whole CTranslate2 model of made-up weights, written as its converter writes one, with whatever a test changes."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint.ctranslate2_bin import DTYPES

CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CODES = {name: number for number, name in DTYPES.items()}
Arrays = dict[str, np.ndarray]


def variables(config: Mapping[str, Any] = CONFIG, int8: bool = False) -> Arrays:
    """Return the variables of a Llama by name."""
    random = np.random.default_rng(0)
    width, inner, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    of_keys, size = config.get("num_key_value_heads", heads), width // heads
    found: Arrays = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        weight = random.normal(0, 0.1, (rows, columns)).astype(np.float32)
        scale = 127 / np.abs(weight).max(axis=1)
        found[f"decoder/{name}/weight"] = np.rint(weight * scale[:, None]).astype(np.int8) if int8 else weight
        if int8:
            found[f"decoder/{name}/weight_scale"] = scale.astype(np.float32)

    def norm(name: str) -> None:
        found[f"decoder/{name}/gamma"] = random.normal(1, 0.1, width).astype(np.float32)

    for name, value in (("alignment_heads", 1), ("alignment_layer", -1), ("num_heads", heads)):
        found[f"decoder/{name}"] = np.array(value, np.int16)
    flags = {"alibi": 0, "alibi_use_positive_positions": 0, "scale_alibi": 0, "start_from_zero_embedding": 0}
    for name, value in (flags | {"activation": 2, "pre_norm": 1, "scale_embeddings": 0}).items():
        found[f"decoder/{name}"] = np.array(value, np.int8)
    for name in ("embeddings", "projection"):
        matrix(name, config["vocab_size"], width)
    norm("layer_norm")
    for number in range(config["num_hidden_layers"]):
        layer = f"layer_{number}"
        attention = f"decoder/{layer}/self_attention"
        found[f"{attention}/num_heads_kv"] = np.array(of_keys, np.int32)
        found[f"{attention}/rotary_base"] = np.array(10_000, np.float32)
        found[f"{attention}/rotary_dim"] = np.array(0, np.int32)
        found[f"{attention}/rotary_interleave"] = np.array(0, np.int8)
        matrix(f"{layer}/self_attention/linear_0", (heads + 2 * of_keys) * size, width)
        matrix(f"{layer}/self_attention/linear_1", width, width)
        matrix(f"{layer}/ffn/linear_0", inner, width)
        matrix(f"{layer}/ffn/linear_0_noact", inner, width)
        matrix(f"{layer}/ffn/linear_1", width, inner)
        norm(f"{layer}/self_attention/layer_norm")
        norm(f"{layer}/ffn/layer_norm")
    return found


def text(word: str) -> bytes:
    return struct.pack("<H", len(word.encode()) + 1) + word.encode() + b"\0"


def variable(name: str, shape: Iterable[int], dtype: int, data: bytes, nbytes: int | None = None) -> bytes:
    """Encode a variable's header and data; `nbytes`: the length of the data by the header."""
    sizes = list(shape)
    head = text(name) + struct.pack(f"<B{len(sizes)}I", len(sizes), *sizes)
    return head + struct.pack("<BI", dtype, len(data) if nbytes is None else nbytes) + data


def pack(arrays: Iterable[tuple[str, np.ndarray]], aliases: Iterable[tuple[str, str]] = (), *more: bytes) -> bytes:
    """model.bin; `more`: variables that are packed already."""
    packed = [*(variable(name, each.shape, CODES[each.dtype.name], each.tobytes()) for name, each in arrays), *more]
    pairs = [text(alias) + text(target) for alias, target in aliases]
    head = struct.pack("<I", 6) + text("TransformerDecoderSpec") + struct.pack("<II", 8, len(packed))
    return head + b"".join(packed) + struct.pack("<I", len(pairs)) + b"".join(pairs)


def write(folder: Path, content: bytes, tokens: int = CONFIG["vocab_size"]) -> Path:
    """Write a folder that CTranslate2 loads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(content)
    words = {"bos_token": "0", "eos_token": "1", "unk_token": "2", "layer_norm_epsilon": 1e-6}
    (folder / "config.json").write_text(json.dumps(words))
    (folder / "vocabulary.json").write_text(json.dumps([str(number) for number in range(tokens)]))
    return folder
