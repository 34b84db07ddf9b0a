#!/usr/bin/env python3
"""Build the `fp16` artifact: the canonical safetensors with every floating-point weight in float16.

    python scripts/build_fp16.py SRC DST

Weights that are float16 already are linked. float32 and bfloat16 are rounded to the nearest float16; a weight that
float16 cannot hold (beyond 65,504) is refused by name, because it would become infinite. Memory stays constant.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpoint import safetensors_file, sharding, shards
from checkpoint.float16 import CAST, stored_dtype, write_float16
from checkpoint.tensor import DTYPE_BYTES
from common import manifest
from common.program import parser, run
from common.publish import place, publish

# auto_map names Python, which is not carried along; the others a kernel of somebody's machine
NOT_CARRIED = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation")


def both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """A config with what transformers 5 calls `dtype` and `rope_parameters` in transformers 4's words too.

    transformers 4 ignores the words of 5, and calculates another model. Parameters that differ between layers have no
    words in 4 and stay alone.
    """
    old: dict[str, Any] = {"torch_dtype": config["dtype"]}
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        old["rope_theta"] = rope["rope_theta"]
        old["rope_scaling"] = scaling if scaling.get("rope_type", "default") != "default" else None
    return config | old


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("src", type=Path, help="folder of the canonical safetensors")
    arguments.add_argument("dst", type=Path, help="folder to write")
    options = arguments.parse_args()

    source = shards.find(options.src)
    origin = manifest.read(options.src)
    tensors = source.tensors()
    with publish(options.dst, source=options.src) as folder:
        folder.mkdir()
        total = sum(tensor.numel * DTYPE_BYTES[stored_dtype(tensor)] for tensor in tensors.values())
        groups = {file.name: [tensor for tensor in tensors.values() if tensor.path == file] for file in source.files}
        with tqdm(total=total, unit="B", unit_scale=True, desc="to float16", disable=None) as bar:
            for name, group in groups.items():
                if any(tensor.dtype in CAST for tensor in group):
                    safetensors_file.write(
                        folder / name, group, dtype=stored_dtype, copy=write_float16, progress=bar.update
                    )
                else:
                    place(source.folder / name, folder / name)
        if (options.src / shards.INDEXES["safetensors"]).exists():
            (folder / shards.INDEXES["safetensors"]).write_text(sharding.index_json(groups, total), encoding="utf-8")
        config = {key: value for key, value in source.config().items() if key not in NOT_CARRIED}
        config = both_spellings(config | {"dtype": "float16"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in source.others():
            if path.name != "config.json":
                place(path, folder / path.name)
        embeddings = tensors.get("model.embed_tokens.weight")
        row_only = (
            embeddings.numel * 2 if embeddings and "lm_head.weight" in tensors else 0
        )  # a tied table is read whole
        manifest.write(
            folder,
            format="fp16",
            engine="transformers",
            tool="build_fp16",
            tool_version=f"numpy {np.__version__}",
            source=origin["source"],
            parameter_count=origin["parameter_count"],
            weight_files=list(groups),
            weight_bytes_per_token=total - row_only,
        )


if __name__ == "__main__":
    run(main)
