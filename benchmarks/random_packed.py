#!/usr/bin/env python3
"""Make GPTQ or AWQ weights at random from a config.json: what a 7B model's speed is measured with, in seconds.

    envs/torch/bin/python benchmarks/random_packed.py CONFIG DST --layout gptq|awq

CONFIG is a config.json of a Llama-like model. Weights have 4 bits in groups of 128; a study takes DST as `prebuilt` of
a model whose source is {random: CONFIG}. As with random weights of 16 bits, the speed is the format's and the text is
noise.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import torch
from safetensors.torch import save_file

import random_weights

GROUP, BITS = 128, 4
WORD = 32 // BITS  # weights in an int32
SPREAD = 4.6  # standard deviation of a uniform draw of 0 to 15
MIDDLE = {"gptq": 0x77777777, "awq": 0x88888888}  # eight zero points of 8, which GPTQ stores less one
QUANTIZATION = {
    "gptq": {"quant_method": "gptq", "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm"},
}


def pack(name: str, shape: tuple[int, ...], layout: str, deviation: float, noise: np.random.Generator) -> dict:
    """A linear layer's tensors; `shape` is [outputs, inputs]."""
    outputs, inputs = shape
    layer, groups = name.removesuffix(".weight"), inputs // GROUP
    packed = (inputs // WORD, outputs) if layout == "gptq" else (inputs, outputs // WORD)
    words = noise.integers(-(2**31), 2**31, packed, dtype=np.int32)
    zeros = torch.full((groups, outputs // WORD), np.uint32(MIDDLE[layout]).astype(np.int32).item(), dtype=torch.int32)
    found = {
        f"{layer}.qweight": torch.from_numpy(words),
        f"{layer}.qzeros": zeros,
        f"{layer}.scales": torch.full((groups, outputs), deviation / SPREAD, dtype=torch.float16),
    }
    if layout == "gptq":
        found[f"{layer}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // GROUP
    return found


def main() -> None:
    """Make it."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("config", type=Path)
    arguments.add_argument("dst", type=Path)
    arguments.add_argument("--layout", choices=list(QUANTIZATION), required=True)
    options = arguments.parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    shapes, vocab_size = random_weights.parameter_shapes(options.config)
    noise, deviation = np.random.default_rng(0), config.get("initializer_range", 0.02)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and ".layers." in name:
            tensors |= pack(name, shape, options.layout, deviation, noise)
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.float16)
        else:
            tensors[name] = torch.from_numpy(noise.normal(0, deviation, shape).astype(np.float16))
    options.dst.mkdir(parents=True)
    save_file(tensors, options.dst / "model.safetensors", metadata={"format": "pt"})
    words = {**QUANTIZATION[options.layout], "bits": BITS, "group_size": GROUP}
    content = config | {"torch_dtype": "float16", "dtype": "float16", "quantization_config": words}
    (options.dst / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    random_weights.write_placeholder_tokenizer(options.dst, vocab_size)


if __name__ == "__main__":
    main()
