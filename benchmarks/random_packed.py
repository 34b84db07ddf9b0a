#!/usr/bin/env python3
"""Make random quantized weights from a config.json, to measure the speed of a 7B model without quantizing it.

    envs/torch/bin/python benchmarks/random_packed.py CONFIG DST --format gptq|awq|ct-w4a16|ct-fp8|… [--repeat N]

CONFIG is a config.json of a Llama-like model. Tensors and words are those that GPTQ, AWQ, llm-compressor and ExLlamaV3
write (scripts/quantmill/layouts). Weights of 4 bits are in groups of 128, except 4-bit floats and EXL3. A study takes
DST as `prebuilt` of a model whose source is {random: CONFIG}. As with random weights of 16 bits, the speed is the
format's and the text is noise. With --repeat the text repeats every N tokens, so that all speculation is correct: the
layers add little to the embedding, and the head maps a token's embedding to the next of its N tokens.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import torch
from safetensors.torch import save_file

from quantmill.fetch import random_weights

Tensors = dict[str, torch.Tensor]
GROUP, BITS = 128, 4
WORD = 32 // BITS  # weights in an int32
TILE, HEAD_BITS = 16, 6  # of EXL3, which alone quantizes the head
INT4, INT8, E4M3, E2M1 = 4.6, 74, 0.45, 2.9  # standard deviations of what random bits are; of E4M3 below 2
LITTLE = 0.01  # of what a layer adds to random weights' residual, where the text repeats
ADDS = ("o_proj", "down_proj")
ZERO_POINTS = {"gptq": 0x77777777, "awq": 0x88888888}  # eight of 8, which GPTQ stores less one


def bits(noise: np.random.Generator, shape: tuple[int, ...], dtype: type) -> torch.Tensor:
    limits = np.iinfo(dtype)
    return torch.from_numpy(noise.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True))


def groups_of_four_bits(layout: str) -> Callable[..., Tensors]:
    """Draw a linear layer of GPTQ or AWQ."""

    def pack(outputs: int, inputs: int, deviation: float, noise: np.random.Generator) -> Tensors:
        groups, zero = inputs // GROUP, np.uint32(ZERO_POINTS[layout]).astype(np.int32).item()
        packed = (inputs // WORD, outputs) if layout == "gptq" else (inputs, outputs // WORD)
        found = {
            "qweight": bits(noise, packed, np.int32),
            "qzeros": torch.full((groups, outputs // WORD), zero, dtype=torch.int32),
            "scales": torch.full((groups, outputs), deviation / INT4, dtype=torch.float16),
        }
        return found | ({"g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP} if layout == "gptq" else {})

    return pack


def w4a16(outputs: int, inputs: int, deviation: float, noise: np.random.Generator) -> Tensors:
    return {
        "weight_packed": bits(noise, (outputs, inputs // WORD), np.int32),
        "weight_scale": torch.full((outputs, inputs // GROUP), deviation / INT4, dtype=torch.float16),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def w8a8(outputs: int, inputs: int, deviation: float, noise: np.random.Generator) -> Tensors:
    scale = torch.full((outputs, 1), deviation / INT8)
    return {"weight": bits(noise, (outputs, inputs), np.int8), "weight_scale": scale}


def fp8(outputs: int, inputs: int, deviation: float, noise: np.random.Generator) -> Tensors:
    # without the highest exponent bit, so that no weight is NaN
    weight = (bits(noise, (outputs, inputs), np.uint8) & 0xBF).view(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": torch.full((outputs, 1), deviation / E4M3)}


def nvfp4(outputs: int, inputs: int, deviation: float, noise: np.random.Generator, activations: bool) -> Tensors:
    found = {
        "weight_packed": bits(noise, (outputs, inputs // 2), np.uint8),
        "weight_scale": torch.full((outputs, inputs // 16), 256.0).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([256 * E2M1 / deviation]),
    }
    return found | ({"input_global_scale": torch.tensor([448.0])} if activations else {})


def mxfp4(outputs: int, inputs: int, deviation: float, noise: np.random.Generator) -> Tensors:
    exponent = 127 + round(np.log2(deviation / E2M1))
    return {
        "weight_packed": bits(noise, (outputs, inputs // 2), np.uint8),
        "weight_scale": torch.full((outputs, inputs // 32), exponent, dtype=torch.uint8),
    }


def exl3(outputs: int, inputs: int, deviation: float, noise: np.random.Generator, rate: int = BITS) -> Tensors:
    return {
        "trellis": bits(noise, (inputs // TILE, outputs // TILE, TILE * rate), np.int16),
        "suh": torch.ones(inputs, dtype=torch.float16),
        "svh": torch.full((outputs,), deviation, dtype=torch.float16),
        "mul1": torch.tensor(0x83DCD12D - 2**32, dtype=torch.int32),
    }


def compressed_tensors(format: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config`."""
    common = {"symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "format": format,
        "weights": common | weights,
        "input_activations": common | activations if activations else None,
    }
    found = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": format}
    return found | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def repeat(tensors: Tensors, tokens: int, vocab_size: int) -> None:
    """Make each token be followed by the next of n, and the last by the first."""
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embeddings.div_(embeddings.float().std())
    ids = torch.arange(vocab_size)
    following = ids - ids % tokens + (ids + 1) % tokens
    head[following.clamp(max=vocab_size - 1)] = embeddings


GROUPED = {"bits": BITS, "group_size": GROUP}
GPTQ = {"quant_method": "gptq", "sym": True, "desc_act": False, "checkpoint_format": "gptq", **GROUPED}
AWQ = {"quant_method": "awq", "zero_point": True, "version": "gemm", **GROUPED}
PER_TOKEN = {"strategy": "token", "dynamic": True, "num_bits": 8}
INT, FLOAT = {"type": "int"}, {"type": "float"}
TENSOR_GROUP = {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MX = {**FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32}
FORMATS: dict[str, tuple[Callable[..., Tensors], dict[str, Any]]] = {
    "gptq": (groups_of_four_bits("gptq"), GPTQ),
    "awq": (groups_of_four_bits("awq"), AWQ),
    "ct-w4a16": (w4a16, compressed_tensors("pack-quantized", **INT, num_bits=4, strategy="group", group_size=GROUP)),
    "ct-w8a8": (w8a8, compressed_tensors("int-quantized", PER_TOKEN | INT, **INT, num_bits=8, strategy="channel")),
    "ct-fp8": (fp8, compressed_tensors("float-quantized", PER_TOKEN | FLOAT, **FLOAT, num_bits=8, strategy="channel")),
    "ct-nvfp4a16": (
        lambda *layer: nvfp4(*layer, activations=False),
        compressed_tensors("nvfp4-pack-quantized", **TENSOR_GROUP),
    ),
    "ct-nvfp4": (
        lambda *layer: nvfp4(*layer, activations=True),
        compressed_tensors("nvfp4-pack-quantized", TENSOR_GROUP | {"dynamic": "local"}, **TENSOR_GROUP),
    ),
    "ct-mxfp4": (mxfp4, compressed_tensors("mxfp4-pack-quantized", MX | {"dynamic": True}, **MX)),
    "exl3": (exl3, {"quant_method": "exl3", "bits": BITS, "head_bits": HEAD_BITS, "codebook": "mul1"}),
}


def main() -> None:
    """Write the artifact."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("config", type=Path)
    arguments.add_argument("dst", type=Path)
    arguments.add_argument("--format", choices=list(FORMATS), required=True)
    arguments.add_argument("--repeat", type=int, default=0, help="tokens until the text repeats")
    options = arguments.parse_args()
    if options.repeat and options.format == "exl3":
        arguments.error("--repeat: answers by the head, which EXL3 quantizes")
    config = json.loads(options.config.read_text(encoding="utf-8"))
    shapes, vocab_size = random_weights.parameter_shapes(options.config)
    noise, deviation = np.random.default_rng(0), config.get("initializer_range", 0.02)
    pack, words = FORMATS[options.format]
    tensors: Tensors = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and ".layers." in name:
            spread = deviation * (LITTLE if options.repeat and layer.endswith(ADDS) else 1)
            tensors |= {f"{layer}.{part}": value for part, value in pack(*shape, spread, noise).items()}
        elif layer == "lm_head" and options.format == "exl3":
            tensors |= {f"{layer}.{part}": value for part, value in exl3(*shape, deviation, noise, HEAD_BITS).items()}
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.float16)
        else:
            tensors[name] = torch.from_numpy(noise.normal(0, deviation, shape).astype(np.float16))
    if options.repeat:
        repeat(tensors, options.repeat, vocab_size)
    options.dst.mkdir(parents=True)
    save_file(tensors, options.dst / "model.safetensors", metadata={"format": "pt"})
    content = config | {"torch_dtype": "float16", "dtype": "float16", "quantization_config": words}
    (options.dst / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    random_weights.write_placeholder_tokenizer(options.dst, vocab_size)


if __name__ == "__main__":
    main()
