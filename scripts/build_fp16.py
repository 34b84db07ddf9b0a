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

from checkpoint import portable, safetensors_file, sharding, shards
from checkpoint.float16 import CAST, stored_dtype, write_float16
from checkpoint.tensor import DTYPE_BYTES
from common import manifest, quality_gate
from common.program import UserError, parser, run
from common.publish import place, publish

OUTSIDE = ("rope_theta", "partial_rotary_factor")  # of rope_parameters: beside rope_scaling in transformers 4's words


def both_spellings(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """A config with what transformers 5 calls `dtype` and `rope_parameters` in transformers 4's words too.

    transformers 4 ignores the words of 5, and calculates another model. Parameters that differ between layers have no
    words in 4 and stay alone.

    Raises `UserError` where config.json, at `path`, says it in both, and not the same: transformers 5 then takes
    rope_scaling, other tools the other, and nobody knows which of them the model was trained with.
    """
    old: dict[str, Any] = {"torch_dtype": config["dtype"]}
    rope, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, each in (("rope_parameters", rope), ("rope_scaling", scaling)):
        if not isinstance(each, dict):
            raise UserError(f"{path}: {name} is {each!r:.60}, not an object; download it again")
    for key in OUTSIDE:
        said = {str(each[key]) for each in (rope, scaling, config) if each.get(key) is not None}
        if len(said) > 1:
            raise UserError(f"{path}: says {key} twice, {' and '.join(sorted(said))}; remove the wrong one")
    if rope and scaling and scaling_of(rope) != scaling_of(scaling):
        raise UserError(f"{path}: rope_parameters and rope_scaling contradict each other; remove the wrong one")
    if rope and scaling and config.get("rope_theta", scaling.get("rope_theta")) is None and "rope_theta" in rope:
        raise UserError(f"{path}: rope_scaling hides the rope_theta in rope_parameters; remove rope_scaling")
    if "rope_theta" in rope:
        old |= {key: rope[key] for key in OUTSIDE if key in rope}
        old["rope_scaling"] = scaling_of(rope)
    return config | old


def scaling_of(rope: dict[str, Any]) -> dict[str, Any] | None:
    """Rotary parameters as transformers 4's `rope_scaling`, `rope_type` its kind; None where nothing is scaled."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {key: value for key, value in rope.items() if key not in (*OUTSIDE, "type", "rope_type")}
    return {"rope_type": kind} | scaling if kind != "default" else None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("src", type=Path, help="folder of the canonical safetensors")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda: where the quality gate runs it")
    quality_gate.add_arguments(arguments)
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
        config = both_spellings(portable.config(source.config()) | {"dtype": "float16"}, options.src / "config.json")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in source.others():
            if path.name != "config.json":
                place(path, folder / path.name)
        embeddings = tensors.get("model.embed_tokens.weight")
        row_only = (
            embeddings.numel * 2 if embeddings and "lm_head.weight" in tensors else 0
        )  # a tied table is read whole
        gate = quality_gate.check(folder, "transformers", "source", options.device, options, options.gate_python)
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
            gate=gate,
        )


if __name__ == "__main__":
    run(main)
