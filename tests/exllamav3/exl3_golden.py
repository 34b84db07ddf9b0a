#!/usr/bin/env python3
"""Random EXL3 layers with the weights that ExLlamaV3's kernels make of them, for test_exl3.py:

    python tests/exllamav3/exl3_golden.py tests/data/exl3.npz

in envs/exllamav3 on a GPU, in a folder whose artifacts/libraries/exllamav3 is there. Any bits are a valid trellis.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import numpy as np
import torch

from quantmill.exllamav3 import library

library()
from exllamav3.modules.quant.exl3 import LinearEXL3  # noqa: E402

SIZE = 128
CASES = ((4, "mul1"), (2.5, "mul1"), (3, "mcg"), (5, "3inst"), (1, "mul1"))  # bits a weight, codebook


def main() -> None:
    random = np.random.default_rng(7)
    arrays = {}
    for rate, kind in CASES:
        trellis = random.integers(-(2**15), 2**15, (SIZE // 16, SIZE // 16, int(16 * rate)), dtype=np.int16)
        suh, svh = (random.normal(size=SIZE).astype(np.float16) for _ in range(2))
        parts = {"trellis": trellis, "suh": suh, "svh": svh}
        mark = {kind: torch.tensor(1, dtype=torch.int32)} if kind != "3inst" else {}
        tensors = {name: torch.from_numpy(value).cuda() for name, value in parts.items()}
        layer = LinearEXL3(None, SIZE, SIZE, **tensors, **mark)
        parts["weight"] = layer.get_weight_tensor().cpu().numpy()
        arrays |= {f"{kind}-{rate}.{name}": value for name, value in parts.items()}
    np.savez_compressed(sys.argv[1], **arrays)


if __name__ == "__main__":
    main()
