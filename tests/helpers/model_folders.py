"""Small models' folders, each in one call: a Llama, a GPT-2 and a mixture, with whatever is to be wrong in them, and
the demo in float8."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from weight_files import save_file

from quantmill import layouts
from quantmill.checkpoint import shards

DEMO = Path(__file__).parents[2] / "demo"
BLOCK = 128
VOCAB, HIDDEN, INNER, LAYERS, EXPERTS = 48, 16, 24, 3, 4
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
MIXTURE = LLAMA | {"model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
Tensors = dict[str, np.ndarray]


def zeros(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    return {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}


def llama(layers: int = LAYERS) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for number in range(layers):
        parts = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN)}
        parts |= {"self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
        parts |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
        parts |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{number}.{part}.weight": shape for part, shape in parts.items()}
    return zeros(shapes | {"lm_head.weight": (VOCAB, HIDDEN)})


def mixture() -> Tensors:
    found = {name: value for name, value in llama().items() if ".mlp." not in name}
    for number in range(LAYERS):
        place = f"model.layers.{number}.block_sparse_moe"
        found |= zeros({f"{place}.gate.weight": (EXPERTS, HIDDEN)})
        for expert in range(EXPERTS):
            parts = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
            found |= zeros({f"{place}.experts.{expert}.{part}.weight": shape for part, shape in parts.items()})
    return found


def gpt2() -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCAB, HIDDEN), "wpe.weight": (64, HIDDEN)}
    for number in range(LAYERS):
        parts = {
            "ln_1.weight": (HIDDEN,),
            "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
            "attn.c_attn.bias": (3 * HIDDEN,),
        }
        parts |= {"mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN), "mlp.c_proj.weight": (4 * HIDDEN, HIDDEN)}
        shapes |= {f"h.{number}.{part}": shape for part, shape in parts.items()}
    return zeros(shapes | {"ln_f.weight": (HIDDEN,)})


def write(folder: Path, config: Mapping[str, Any] = LLAMA, tensors: Tensors | None = None) -> Path:
    """Write a model's folder with these tensors, by default those of `llama`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(llama() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def float8_levels() -> np.ndarray:
    """Return the values of e4m3 without a sign, by their bytes: three bits of mantissa, a bias of seven."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    return np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa * 2.0**-9)


def in_float8(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix in float8, as bytes, and its float32 scales, of blocks of 128; the last ones are cut."""
    rows, columns = (-(-side // BLOCK) for side in weights.shape)
    padded = np.zeros((rows * BLOCK, columns * BLOCK))
    padded[: weights.shape[0], : weights.shape[1]] = weights
    scales = (np.abs(padded).reshape(rows, BLOCK, columns, BLOCK).max((1, 3)) / 448).astype(np.float32)
    whole = np.kron(scales, np.ones((BLOCK, BLOCK)))[: weights.shape[0], : weights.shape[1]]
    levels = float8_levels()
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(weights) / whole)
    return (codes + 128 * (weights < 0)).astype(np.uint8), scales


def demo_in_float8(folder: Path) -> Path:
    """Write the demo with its linear layers in float8, as DeepSeek and Qwen publish theirs."""
    folder.mkdir()
    tensors: Tensors = {}
    for name, tensor in shards.find(DEMO).tensors().items():
        tensors[name] = layouts.array(tensor)
        if name.endswith("_proj.weight"):
            codes, tensors[f"{name}_scale_inv"] = in_float8(tensors[name].astype(np.float64))
            tensors[name] = codes.view(bool)
    save_file(tensors, folder / "model.safetensors")
    words = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    config = json.loads((DEMO / "config.json").read_text()) | {"quantization_config": words}
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / file, folder)
    return folder
