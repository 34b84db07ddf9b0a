"""Reading an artifact's weights: `tensor-cache.json` has each parameter's place in the shards."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quantmill.checkpoint import shards
from quantmill.common.program import UserError

INDEX = "tensor-cache.json"
MAX_INDEX = 64 * 2**20  # bytes


def read(folder: Path, wanted: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, np.ndarray]:
    """Return the parameters of `wanted` (name -> shape, dtype) in its order, memory-mapped.

    Raises `UserError` if one is missing, of another shape or type, or beyond its shard.
    """
    found: dict[str, np.ndarray] = {}
    index, again = folder / INDEX, "build the artifact again"
    try:
        for shard in shards.read_json(index, MAX_INDEX)["records"]:
            path = folder / Path(shard["dataPath"]).name
            data = np.memmap(path, np.uint8, "r")
            for record in shard["records"]:
                start, end = record["byteOffset"], record["byteOffset"] + record["nbytes"]
                if start < 0 or end > len(data):
                    raise UserError(f"{path}: is too short for {record['name']}; {again}")
                found[record["name"]] = data[start:end].view(record["dtype"]).reshape(record["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{index}: is damaged ({error!r:.80}); {again}") from None
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            raise UserError(f"{index}: lacks {name}, which the model's config asks for; {again}")
        there = found[name]
        if there.shape != shape or there.dtype != dtype:
            kinds = f"{there.dtype} {list(there.shape)}, not {dtype} {list(shape)}"
            raise UserError(f"{index}: {name} is {kinds}; {again}")
    return {name: found[name] for name in wanted}
