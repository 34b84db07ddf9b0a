"""Build the `fp16` artifact: the canonical safetensors with every floating-point weight in float16.

    python scripts/quantmill build.fp16 SRC DST

Files whose weights are all float16 are copied. With --parameters '{"share": true}' they share SRC's bytes, if SRC is an
artifact of Quantmill's. float32 and bfloat16 are rounded to the nearest float16. A tensor that float16 cannot hold
(beyond 65,504) keeps its dtype, because it would become infinite. Memory stays constant.
"""

import io
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from quantmill.build import check_parameters, finish, parser
from quantmill.checkpoint import portable, safetensors_file, selection, sharding, shards
from quantmill.checkpoint.copying import copy
from quantmill.checkpoint.float16 import CAST, BeyondFloat16, fits, stored_dtype, write_float16
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import DTYPE_BYTES, Tensor
from quantmill.common import manifest
from quantmill.common.atomic import clone_or_copy, share, write_atomically
from quantmill.common.program import UserError

OUTSIDE = ("rope_theta", "partial_rotary_factor")  # which transformers 4 has outside rope_scaling


def both_spellings(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a config that has transformers 5's `dtype` and `rope_parameters` in transformers 4's words too.

    transformers 4 ignores the words of 5, and calculates another model. It has no words for parameters that differ
    between layers.

    Raises `UserError` where config.json, at `path`, has both words with different values. transformers 5 then reads
    rope_scaling and other tools read rope_parameters, and only one of them is right.
    """
    old: dict[str, Any] = {"torch_dtype": config["dtype"]}
    rope, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, each in (("rope_parameters", rope), ("rope_scaling", scaling)):
        if not isinstance(each, dict):
            raise UserError(f"{path}: {name} is {each!r:.60}, not an object; download it again")
    for key in OUTSIDE:
        said = {str(each[key]) for each in (rope, scaling, config) if each.get(key) is not None}
        if len(said) > 1:
            raise UserError(f"{path}: has two values of {key}, {' and '.join(sorted(said))}; remove the wrong one")
    if rope and scaling and scaling_of(rope) != scaling_of(scaling):
        raise UserError(f"{path}: rope_parameters and rope_scaling contradict each other; remove the wrong one")
    if rope and scaling and config.get("rope_theta", scaling.get("rope_theta")) is None and "rope_theta" in rope:
        raise UserError(f"{path}: rope_scaling hides the rope_theta in rope_parameters; remove rope_scaling")
    if "rope_theta" in rope:
        old |= {key: rope[key] for key in OUTSIDE if key in rope}
        old["rope_scaling"] = scaling_of(rope)
    return config | old


def scaling_of(rope: dict[str, Any]) -> dict[str, Any] | None:
    """Return rotary parameters as transformers 4's `rope_scaling`; None where nothing is scaled."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {key: value for key, value in rope.items() if key not in (*OUTSIDE, "type", "rope_type")}
    return {"rope_type": kind} | scaling if kind != "default" else None


def dtype_of(tensor: Tensor, kept: Collection[str]) -> str:
    """Return the dtype that a tensor is stored in: its own if it is `kept`, else float16."""
    return tensor.dtype if tensor.name in kept else stored_dtype(tensor)


def write_weights(
    folder: Path, source: Checkpoint, groups: Mapping[str, Sequence[Tensor]], kept: Collection[str], shared: bool
) -> None:
    """Write the weight files. With `shared`, files that do not change share their bytes with the source's.

    Raises `BeyondFloat16` for a tensor that float16 cannot hold, unless it is `kept`.
    """

    def write(tensor: Tensor, target: io.FileIO) -> None:
        (copy if tensor.name in kept else write_float16)(tensor, target)

    dtype = partial(dtype_of, kept=kept)
    total = sum(tensor.numel * DTYPE_BYTES[dtype(tensor)] for group in groups.values() for tensor in group)
    with tqdm(total=total, unit="B", unit_scale=True, desc="to float16", disable=None) as bar:
        for name, group in groups.items():
            if any(tensor.dtype in CAST for tensor in group):
                safetensors_file.write(folder / name, group, dtype=dtype, copy=write, progress=bar.update)
            else:
                (share if shared else clone_or_copy)(source.folder / name, folder / name)


def main() -> None:
    options = parser(__doc__).parse_args()
    shared = check_parameters(options.parameters, (), ("share",)).get("share", False)

    source = shards.find(options.src)
    origin = manifest.read_checked(options.src)
    tensors = source.tensors()
    with write_atomically(options.dst, source=options.src) as folder:
        folder.mkdir()
        groups = {file.name: [tensor for tensor in tensors.values() if tensor.path == file] for file in source.files}
        kept: set[str] = set()
        try:
            write_weights(folder, source, groups, kept, shared)
        except BeyondFloat16:
            kept = {tensor.name for tensor in tensors.values() if not fits(tensor)}
            for name in groups:
                (folder / name).unlink(missing_ok=True)  # never written over: it may be shared
            write_weights(folder, source, groups, kept, shared)
        sizes = {name: tensor.numel * DTYPE_BYTES[dtype_of(tensor, kept)] for name, tensor in tensors.items()}
        total = sum(sizes.values())
        if (options.src / selection.INDEXES["safetensors"]).exists():
            (folder / selection.INDEXES["safetensors"]).write_text(sharding.index_json(groups, total), encoding="utf-8")
        dtype = "bfloat16" if any(tensors[name].is_weight for name in kept) else "float16"
        config = both_spellings(portable.config(source.config()) | {"dtype": dtype}, options.src / "config.json")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in source.others():
            if path.name != "config.json":
                clone_or_copy(path, folder / path.name)
        finish(
            folder,
            options,
            "source",
            tool="build.fp16",
            tool_version=f"numpy {np.__version__}",
            parameter_count=origin["parameter_count"],
            weight_files=list(groups),
            parameters={"not_float16": sorted(kept)} if kept else {},
            weight_bytes_per_token=shards.bytes_read(sizes, config),
        )
