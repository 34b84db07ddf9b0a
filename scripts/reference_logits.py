#!/usr/bin/env python3
"""Keep the reference's logits over the evaluation text: every other format is compared with them.

    python scripts/reference_logits.py ARTIFACT OUT.npy --engine transformers --evaluation evaluation.json

OUT is a float16 array [scored positions, vocab]. A row is shifted so that its largest logit is 0, which no softmax
notices and which puts float16's precision where the probability is. The size is checked against the free disk first.
"""

import shutil
from pathlib import Path

import numpy as np
from tqdm import tqdm

import devices
import engines
from common import scoring
from common.program import UserError, parser, run
from common.publish import publish
from devices import cpu


def create(path: Path, shape: tuple[int, int]) -> np.memmap:
    """An empty float16 .npy file of a shape. Raises `UserError` where the disk cannot hold it."""
    need, free = shape[0] * shape[1] * 2, shutil.disk_usage(path.parent).free
    if need > free:
        raise UserError(
            f"{path.parent}: reference logits take {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
            "free some disk, or score a shorter evaluation text"
        )
    with path.open("wb") as file:  # np.save would append .npy to the temporary name
        np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": shape})
    return np.memmap(path, np.float16, "r+", offset=path.stat().st_size, shape=shape)


def main() -> None:
    arguments = parser(__doc__)
    scoring.add_arguments(arguments)
    options = arguments.parse_args()

    device = devices.resolve(options.device)
    text = scoring.read_text(options.evaluation, options.protocol)
    engine = engines.load(options.engine, options.artifact, device, min(options.threads, cpu.available_threads()))
    array: np.memmap | None = None
    with publish(options.out) as partial:
        for chunk in tqdm(scoring.chunks(engine, text), desc="reference logits", mininterval=1):
            if array is None:
                array = create(partial, (text.positions, chunk.logits.shape[1]))
            rows = chunk.logits - chunk.logits.max(axis=-1, keepdims=True)
            array[chunk.first : chunk.first + len(rows)] = rows
            del chunk, rows  # the engine makes the next chunk while this one is gone
        array.flush()


if __name__ == "__main__":
    run(main)
