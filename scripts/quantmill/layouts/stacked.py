"""Experts that a source stacks in one tensor and an artifact stores one by one, as linear layers.

A source's `….experts.gate_up_proj` is [experts, 2 * inner, inputs], and `….experts.down_proj` [experts, inputs, inner];
models of `TRANSPOSED` have the last two dimensions the other way round. With `_bias` there is no dimension of inputs.
An artifact has `….experts.N.gate_proj.weight`, `up_proj` and `down_proj`.

gpt-oss alternates outputs of gate and up, other models have all of gate first. llm-compressor and llama.cpp part them.
gptqmodel cuts the middle of gpt-oss's outputs too: what it calls gate and up is half of each, and its engine joins them
again. So the one of both ways is taken that is nearer to the source.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.model_config import of_text

TRANSPOSED = ("gpt_oss", "llama4_text", "qwen3_vl_moe_text")  # model types
STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?")
Read = Callable[[Tensor], np.ndarray]


def reader(source: Checkpoint, read_one: Read, read_source: Read) -> Read:
    """Return a function that reads a stacked tensor of the source from an artifact's single experts.

    read_one: reads one expert's part; it gets a tensor of its name and shape. read_source: the source's own tensor.
    """
    transposed = of_text(source.config()).get("model_type") in TRANSPOSED

    def read_stack(tensor: Tensor) -> np.ndarray:
        name = STACKED.fullmatch(tensor.name)
        assert name is not None
        parts = ("gate_proj", "up_proj") if name[2] == "gate_up_proj" else ("down_proj",)
        count, *dimensions = tensor.shape
        outputs, *inputs = dimensions[::-1] if transposed else dimensions
        kind, shape = "bias" if name[3] else "weight", (outputs // len(parts), *inputs)
        stack, theirs = np.empty(tensor.shape, np.float32), read_source(tensor)
        for number in range(count):
            each = [read_one(replace(tensor, name=f"{name[1]}.{number}.{part}.{kind}", shape=shape)) for part in parts]
            ways = [np.stack(each, axis).reshape(outputs, *inputs) for axis in (0, 1)]
            turned = [way.T if transposed else way for way in ways]
            stack[number] = min(turned, key=lambda way: float(np.linalg.norm(way - theirs[number])))
        return stack

    return read_stack
