"""Write which experts of a mixture a calibration text reaches, as transformers routes its tokens.

    python scripts/quantmill build.count_experts MODEL OUT --calibration calibration.json --evaluation evaluation.json
        [--samples 128] [--sequence-length 2048] [--seed 0]

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
    arguments.add_argument("--calibration", type=Path, required=True, help="what tokens.tokenize_texts wrote")
    arguments.add_argument("--evaluation", type=Path, required=True, help="the same, of the evaluation text")
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--sequence-length", type=int, default=2048)
    arguments.add_argument("--seed", type=int, default=0)
    devices.add_arguments(arguments)
    options = arguments.parse_args()

    words = {name: getattr(options, name) for name in ("samples", "sequence_length", "seed")}
    samples = calibration.read(options.calibration, options.evaluation, **words).samples
    device = devices.resolve(options.device)
    model = engines.load("transformers", options.model, device, options.threads).model
    counts = Counts(model)
    with torch.inference_mode():
        for ids in samples:
            model(input_ids=torch.tensor([ids], device=device), use_cache=False, logits_to_keep=1)
    write_json(options.out, counts.as_json())
