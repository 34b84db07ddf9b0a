"""What the programs that quantize share: their arguments, and how what a tool saved becomes an artifact."""

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import safetensors_file, sharding, shards
from checkpoint.float16 import stored_dtype, write_float16
from checkpoint.shards import Checkpoint
from checkpoint.tensor import DTYPE_BYTES
from common import manifest, program, quality_gate
from common.publish import place
from quantization.calibration import Calibration

SHARD_BYTES = 5 * 10**9


def parser(doc: str) -> argparse.ArgumentParser:
    """The arguments of a program that quantizes: a model, a calibration and the text that it must not share."""
    arguments = program.parser(doc)
    arguments.add_argument("src", type=Path, help="folder of the fp16 artifact")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--calibration", type=Path, required=True, help="what tokenize_texts.py wrote")
    arguments.add_argument("--evaluation", type=Path, required=True, help="the same, of the evaluation text")
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--sequence-length", type=int, default=2048)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda")
    quality_gate.add_arguments(arguments)
    return arguments


def boolean(text: str) -> bool:
    """`true` or `false`, as a config writes them."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def write_artifact(
    folder: Path,
    saved: Path,
    source: Checkpoint,
    *,
    format: str,
    tool: str,
    tool_version: str,
    parameters: Mapping[str, Any],
    calibration: Calibration,
    device: str,
    options: argparse.Namespace,
) -> None:
    """Write what a tool saved to `saved` as an artifact that has passed the quality gate.

    Weights that were not quantized are stored in float16 again, the config is the source's with the tool's
    quantization_config added, and all else is carried over: what a tool writes beside that (paths of temporary folders,
    a cache that is off, rope_theta in one spelling) differs from run to run, or makes it another model.
    """
    written = shards.find(saved)
    tensors = written.tensors()
    groups = sharding.split(list(tensors.values()), SHARD_BYTES)
    names = sharding.write(
        folder, "safetensors", groups, partial(safetensors_file.write, dtype=stored_dtype, copy=write_float16)
    )
    quantization = {key: value for key, value in written.config()["quantization_config"].items() if key != "meta"}
    config = source.config() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in source.others():
        if path.name != "config.json":
            place(path, folder / path.name)
    gate = quality_gate.check(folder, "gptqmodel", device, options)
    origin = manifest.read(source.folder)
    stored = {name: tensor.numel * DTYPE_BYTES[stored_dtype(tensor)] for name, tensor in tensors.items()}
    untied = "lm_head.weight" in stored
    manifest.write(
        folder,
        format=format,
        engine="gptqmodel",
        tool=tool,
        tool_version=tool_version,
        parameters={
            **parameters,
            "seed": options.seed,
            "device": device,
            "samples": len(calibration.samples),
            "sequence_length": calibration.sequence_length,
        },
        source=origin["source"],
        parameter_count=origin["parameter_count"],
        weight_files=list(names),
        weight_bytes_per_token=sum(stored.values()) - (stored.get("model.embed_tokens.weight", 0) if untied else 0),
        calibration_sha256=calibration.sha256,
        gate=gate,
    )
