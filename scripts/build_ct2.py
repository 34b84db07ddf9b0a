#!/usr/bin/env python3
"""Convert a checkpoint to CTranslate2.

    python scripts/build_ct2.py SRC DST --quantization int8

The quantization is what CTranslate2's own converter calls it. The converter holds about 1.5 times the float16 weights
plus half a gigabyte, so a machine with less free memory is refused before any work.
"""

import shutil
from pathlib import Path

import ctranslate2
import psutil

from checkpoint import ctranslate2_bin, shards
from common import manifest, own_code, quality_gate
from common.program import UserError, first_line, parser, run
from common.publish import publish

QUANTIZATIONS = ["int8", "int8_float32", "int8_float16", "int8_bfloat16", "float16", "bfloat16", "float32"]


def check_memory(source: shards.Checkpoint, quantization: str) -> None:
    """Refuse early where the conversion would be killed half-way (measured: 1.5 x float16 size + 0.5 GB)."""
    float16_bytes = sum(tensor.numel * 2 for tensor in source.tensors().values())
    need = int(float16_bytes * (3.0 if quantization == "float32" else 1.5)) + 500_000_000
    available = psutil.virtual_memory().available
    if need > available:
        raise UserError(
            f"{source.folder}: CTranslate2's converter needs about {need / 1e9:.1f} GB of memory and "
            f"{available / 1e9:.1f} GB are free; convert on a larger machine"
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("src", type=Path, help="folder of the canonical safetensors")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--quantization", choices=QUANTIZATIONS, default="int8")
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda: where the quality gate runs it")
    quality_gate.add_arguments(arguments)
    options = arguments.parse_args()

    own_code.forbid()
    source = shards.find(options.src)
    origin = manifest.read(options.src)
    check_memory(source, options.quantization)
    carried = [path for path in source.others() if path.name.startswith(("token", "special_tokens", "generation"))]
    with publish(options.dst) as folder:
        converter = ctranslate2.converters.TransformersConverter(str(options.src))
        try:
            converter.convert(str(folder), quantization=options.quantization, force=True)
        except Exception as error:  # whatever transformers and CTranslate2 raise for models that they do not know
            raise UserError(f"{options.src}: CTranslate2 cannot convert it ({first_line(error)})") from None
        for path in carried:
            shutil.copy(path, folder / path.name)
        gate = quality_gate.check(folder, "ctranslate2", options.device, options)
        manifest.write(
            folder,
            format=f"ct2-{options.quantization}",
            engine="ctranslate2",
            tool="ctranslate2",
            tool_version=ctranslate2.__version__,
            parameters={"quantization": options.quantization},
            source=origin["source"],
            parameter_count=origin["parameter_count"],
            weight_files=["model.bin"],
            gate=gate,
            weight_bytes_per_token=ctranslate2_bin.bytes_per_token(ctranslate2_bin.read(folder / "model.bin")),
        )


if __name__ == "__main__":
    run(main)
