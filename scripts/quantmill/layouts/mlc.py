"""MLC-LLM's q4f16_1: groups of 32 inputs share a scale, also in embeddings and head; norms and biases are float16.

q_weight [rows, 4 * groups] holds eight inputs a word, the lowest four bits first. A weight is (q - 7) * scale. Some
parameters are several of the source's tensors, one after another (mlc/parameters.py).
"""

from pathlib import Path

import numpy as np

from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.layouts import Reading, Unread, nibbles
from quantmill.mlc import parameters, shards, source_config
from quantmill.mlc.quantize import GROUP


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`."""
    config = source_config.read(source.config(), source.folder / "config.json")
    found = parameters.find(source, config, parameters.LAYOUTS["q4f16_1"])
    wanted = {name: kind for parameter in found for name, kind in parameter.stored().items()}
    arrays = shards.read(artifact, wanted)
    places = {}  # of the source's tensors: the parameter that holds it, and its first row there
    for parameter in found:
        row = 0
        for part in parameter.parts:
            places[part.name] = parameter, row
            row += part.shape[0]

    def weights(tensor: Tensor) -> np.ndarray:
        if tensor.name not in places:
            raise Unread(f"it holds no {tensor.name}")
        parameter, first = places[tensor.name]
        rows = slice(first, first + tensor.shape[0])
        if not parameter.quantized:
            return arrays[f"{parameter.name}.{parameter.suffix}"][rows].astype(np.float32)
        words, scales = (arrays[f"{parameter.name}.{part}"][rows] for part in ("q_weight", "q_scale"))
        groups = nibbles(words).reshape(*scales.shape, GROUP)
        return ((groups - 7) * scales.astype(np.float32)[..., None]).reshape(len(words), -1)[:, : tensor.shape[1]]

    return weights
