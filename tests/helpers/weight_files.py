"""Files of weights, written without Quantmill."""

import json
import struct
from pathlib import Path

import numpy as np

from quantmill.checkpoint import shards
from quantmill.checkpoint.shards import Checkpoint

# types that numpy does not have are passed as types of their width that nothing else here has
DTYPES = {"float16": "F16", "float32": "F32", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}
DTYPES |= {"int64": "I64", "float64": "F64", "bool": "F8_E4M3", "uint16": "BF16", "bytes8": "F8_E8M0"}


def save_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    header, data = {}, b""
    for name, value in tensors.items():
        dtype = DTYPES[value.dtype.name]
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def source(folder: Path, tensors: dict[str, np.ndarray]) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"auto_map": {"x": "y"}, "vocab_size": 3}))
    save_file(tensors, folder / "model.safetensors")
    return shards.find(folder)
