"""GPTQ as auto-gptq stores it: of each linear layer qweight, qzeros, scales and g_idx; all else as in the source.

qweight [inputs / 8, outputs] holds eight inputs a word, qzeros [groups, outputs / 8] eight outputs, the lowest four
bits first; g_idx [inputs] says each input's group. A weight is (q - zero) * scale. The zero point is stored less one,
but in the variant `gptq_v2`.
"""

from pathlib import Path

import numpy as np

from checkpoint import shards
from checkpoint.shards import Checkpoint
from checkpoint.tensor import Tensor
from layouts import Reading, Unread, find

FOUR_BITS = np.arange(0, 32, 4, dtype=np.uint32)


def nibbles(words: np.ndarray) -> np.ndarray:
    """int32 [..., n] -> float32 [..., n, 8]: the eight numbers of each word, the lowest bits first."""
    return ((words.view(np.uint32)[..., None] >> FOUR_BITS) & 15).astype(np.float32)


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for another number of bits."""
    stored = shards.find(artifact).tensors()
    config = shards.read_json(artifact / "config.json")["quantization_config"]
    if config.get("bits") != 4:
        raise Unread(f"{config.get('bits')} bits")
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def weights(tensor: Tensor) -> np.ndarray:
        layer = tensor.name.removesuffix(".weight")
        if f"{layer}.qweight" not in stored:
            return find(stored, tensor.name)
        packed, zeros, scales = (find(stored, f"{layer}.{part}") for part in ("qweight", "qzeros", "scales"))
        outputs = packed.shape[1]
        values = nibbles(packed).transpose(0, 2, 1).reshape(-1, outputs)
        points = nibbles(zeros).reshape(len(zeros), -1)[:, :outputs] + less
        group = find(stored, f"{layer}.g_idx")
        return ((values - points[group]) * scales.astype(np.float32)[group]).T

    return weights
