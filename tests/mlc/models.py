"""Small checkpoints for the tests of MLC's format."""

import json
import struct
from pathlib import Path
from typing import Any

import naive_writer
import numpy as np

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
LLAMA |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"vocab_size": 50, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
LLAMA |= {"hidden_act": "silu", "tie_word_embeddings": False}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
QWEN2 |= {"use_sliding_window": False, "sliding_window": 4096}


def random_tensors(config: dict, dtype: str, seed: int = 0) -> naive_writer.Tensors:
    """Draw normal weights that the dtype can store: float16 for F16, float32 for the others."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in naive_writer.shapes(config).items():
        values = random.normal(0, 0.02, shape).astype(np.float32)
        if dtype == "F16":
            values = values.astype(np.float16)
        if dtype == "BF16":
            values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        tensors[name] = values
    return tensors


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of values as a file stores them."""
    if dtype == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F16": "<f2", "F32": "<f4"}.get(dtype, "<i4")).tobytes()


def write_safetensors(path: Path, tensors: naive_writer.Tensors, dtype: str) -> None:
    """One file."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_manifest(folder: Path) -> None:
    """Make a folder an artifact of Quantmill's."""
    content = {"source": {"kind": "test"}, "parameter_count": 1000}
    (folder / "quantmill.json").write_text(json.dumps(content))


def write_model(
    folder: Path, config: dict, tensors: naive_writer.Tensors, dtype: str = "F16", files: list[list[str]] | None = None
) -> Path:
    """Return a checkpoint; with an index where `files` says which file holds which tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_manifest(folder)
    if files is None:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    weight_map = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names}, dtype)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_sparse(folder: Path, config: dict) -> Path:
    """Return a checkpoint of zeros that takes no room on the disk, float16 in one file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_manifest(folder)
    header, end = {}, 0
    for name, shape in naive_writer.shapes(config).items():
        begin, end = end, end + int(np.prod(shape)) * 2
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder
