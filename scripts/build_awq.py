#!/usr/bin/env python3
"""Quantize a model to AWQ with autoawq.

    python scripts/build_awq.py SRC DST --calibration calibration.json --evaluation evaluation.json [--w-bit 4]
        [--q-group-size 128] [--zero-point true] [--version GEMM]

SRC is the fp16 artifact. The same input gives the same bytes on a CPU.
"""

import tempfile
from pathlib import Path
from typing import Any

import awq
import torch
from awq.quantize.quantizer import AwqQuantizer
from transformers import AutoTokenizer

import devices
from checkpoint import shards
from common.program import UserError, first_line, run
from common.publish import publish
from quantization import calibration, layers
from quantization.program import boolean, parser, write_artifact


class Quantizer(AwqQuantizer):
    """autoawq's own, but for one thing that is wrong on a CPU.

    Its search for a layer's scales keeps the weights with `.cpu()`, which copies nothing there, and then multiplies
    them in place: what it restores is scaled by the first guess. The model is another one afterwards (the demo's
    perplexity 48.6 instead of 46.4) and nothing says so.
    """

    def _compute_best_scale(self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *rest: Any) -> Any:
        original = module2inspect.state_dict
        module2inspect.state_dict = lambda: {name: value.clone() for name, value in original().items()}
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest)
        finally:
            del module2inspect.state_dict


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--w-bit", type=int, choices=[4], default=4)
    arguments.add_argument("--q-group-size", default="128", help="weights that share a scale, or auto")
    arguments.add_argument("--zero-point", type=boolean, default=True)
    arguments.add_argument("--version", choices=["GEMM"], default="GEMM")
    options = arguments.parse_args()

    source = shards.find(options.src)
    size = layers.group_size(options.q_group_size, layers.linear_layers(source.tensors()), options.src)
    chosen = calibration.read(
        options.calibration,
        options.evaluation,
        samples=options.samples,
        sequence_length=options.sequence_length,
        seed=options.seed,
    )
    parameters = {
        "w_bit": options.w_bit,
        "q_group_size": size,
        "zero_point": options.zero_point,
        "version": options.version,
    }
    torch.manual_seed(options.seed)
    device = devices.resolve(options.device)
    with publish(options.dst) as folder, tempfile.TemporaryDirectory() as temporary:
        folder.mkdir()
        try:
            model = awq.AutoAWQForCausalLM.from_pretrained(
                str(options.src),
                torch_dtype=torch.float32 if device == "cpu" else torch.float16,
                device_map=device,
                safetensors=True,
            )
            model.quantize(
                AutoTokenizer.from_pretrained(options.src),
                quant_config=parameters,
                calib_data=chosen.samples,
                max_calib_samples=len(chosen.samples),
                max_calib_seq_len=chosen.sequence_length,
                quantizer_cls=Quantizer,
            )
            model.save_quantized(temporary, safetensors=True)
        except Exception as error:  # whatever transformers and autoawq raise for models that they do not know
            raise UserError(f"{options.src}: autoawq cannot quantize it ({first_line(error)})") from error
        write_artifact(
            folder,
            Path(temporary),
            source,
            format="awq-int4",
            tool="autoawq",
            tool_version=awq.__version__,
            parameters=parameters,
            calibration=chosen,
            device=device,
            options=options,
        )


if __name__ == "__main__":
    run(main)
