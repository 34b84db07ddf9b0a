"""Write the experts of a mixture that a calibration text reaches, as transformers routes its tokens.

    python scripts/quantmill build.count_experts MODEL OUT --calibration calibration.json --evaluation evaluation.json
        --samples 128 --sequence-length 2048 [--seed 0]

MODEL is the fp16 artifact; the programs that quantize run it before they calibrate on the same samples.
"""

from pathlib import Path

import torch

from quantmill import devices, engines
from quantmill.build.quantizer import calibration
from quantmill.build.quantizer.experts import Counts
from quantmill.common.atomic import write_json
from quantmill.common.program import parser


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", type=Path, help="folder of the fp16 artifact")
    arguments.add_argument("out", type=Path, help="JSON file to write")
    calibration.add_arguments(arguments)
    arguments.add_argument("--seed", type=int, default=0)
    devices.add_arguments(arguments)
    options = arguments.parse_args()

    device = devices.resolve(options.device)
    model = engines.load("transformers", options.model, device, options.threads).model  # type: ignore[attr-defined]  # transformers' has it
    counts = Counts(model)
    with torch.inference_mode():
        for ids in calibration.of_options(options).samples:
            model(input_ids=torch.tensor([ids], device=device), use_cache=False, logits_to_keep=1)
    write_json(options.out, counts.as_json())
