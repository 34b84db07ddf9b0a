#!/usr/bin/env python3
"""Quantize a model to GPTQ with gptqmodel, the maintained successor of AutoGPTQ, whose files AutoGPTQ reads as well.

    python scripts/build_gptq.py SRC DST --calibration calibration.json --evaluation evaluation.json [--bits 4]
        [--group-size 128] [--sym true] [--desc-act false] [--damp-percent 0.05]

SRC is the fp16 artifact. The same input gives the same bytes on a CPU.
"""

import os
import tempfile
from pathlib import Path

# Read at import: its own guess is wrong on machines with two cores; no kernel sources may come from the network
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("GPTQMODEL_OFFLINE", "1")

import gptqmodel
import torch

import devices
from checkpoint import shards
from common.program import UserError, first_line, run
from common.publish import publish
from quantization import calibration, layers
from quantization.program import boolean, parser, write_artifact


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--bits", type=int, choices=[2, 3, 4, 8], default=4)
    arguments.add_argument("--group-size", default="128", help="weights that share a scale, or auto")
    arguments.add_argument("--sym", type=boolean, default=True)
    arguments.add_argument("--desc-act", type=boolean, default=False)
    arguments.add_argument("--damp-percent", type=float, default=0.05)
    options = arguments.parse_args()

    source = shards.find(options.src)
    size = layers.group_size(options.group_size, layers.linear_layers(source.tensors()), options.src)
    chosen = calibration.read(
        options.calibration,
        options.evaluation,
        samples=options.samples,
        sequence_length=options.sequence_length,
        seed=options.seed,
    )
    parameters = {
        "bits": options.bits,
        "group_size": size,
        "sym": options.sym,
        "desc_act": options.desc_act,
        "damp_percent": options.damp_percent,
    }
    torch.manual_seed(options.seed)
    device = devices.resolve(options.device)
    data = [
        {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        for ids in chosen.samples
    ]
    with publish(options.dst) as folder, tempfile.TemporaryDirectory() as temporary:
        folder.mkdir()
        try:
            config = gptqmodel.QuantizeConfig(**parameters, device=device, offload_to_disk=False)
            dtype = torch.float32 if device == "cpu" else torch.float16
            model = gptqmodel.GPTQModel.load(str(options.src), config, dtype=dtype)
            model.quantize(data, batch_size=1)
            model.save(temporary)
        except Exception as error:  # whatever transformers and gptqmodel raise for models that they do not know
            raise UserError(f"{options.src}: gptqmodel cannot quantize it ({first_line(error)})") from error
        write_artifact(
            folder,
            Path(temporary),
            source,
            format="gptq-int4",
            tool="gptqmodel",
            tool_version=gptqmodel.__version__,
            parameters=parameters,
            calibration=chosen,
            device=device,
            options=options,
        )


if __name__ == "__main__":
    run(main)
