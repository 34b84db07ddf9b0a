"""Quantize a model with AutoRound, which learns how to round, and store it as GPTQ or AWQ is stored.

    python scripts/quantmill build.autoround SRC DST --layout gptq --calibration calibration.json
        --evaluation evaluation.json [--bits 4] [--group-size auto] [--sym true] [--iters 200]

SRC is the fp16 artifact. The same input gives the same bytes on the same kind of CPU with as many threads.
"""

from importlib.metadata import version

import torch
from auto_round import AutoRound
from auto_round.algorithms.quantization.sign_round.config import SignRoundConfig
from transformers import AutoModelForCausalLM

from quantmill.build.quantizer.program import BuildTask, boolean, build, parser
from quantmill.common import tokenizer

EXPORTS = {"gptq": "auto_gptq", "awq": "auto_awq"}
BATCH = 8  # samples of a step, as AutoRound's own


def quantize(job: BuildTask) -> None:
    """Call AutoRound with the samples' ids."""
    words = dict(job.parameters)
    layout = words.pop("layout")
    samples = [torch.tensor([ids]) for ids in job.calibration.samples] if job.calibration else []
    tool = AutoRound(
        AutoModelForCausalLM.from_pretrained(job.src, dtype=job.dtype),
        tokenizer.for_transformers(job.src),
        alg_configs=SignRoundConfig(**words),
        dataset=samples,
        nsamples=len(samples),
        seqlen=job.calibration.sequence_length if job.calibration else 0,
        batch_size=min(BATCH, len(samples)),
        device_map=job.device,
        enable_torch_compile=False,
    )
    tool.quantize_and_save(str(job.saved), format=EXPORTS[layout])
    for file in job.saved.glob("*/*"):  # it makes a folder of its own, named after the source's
        file.rename(job.saved / file.name)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layout", choices=[*EXPORTS], required=True)
    arguments.add_argument("--bits", type=int, choices=[4], default=4)
    arguments.add_argument("--group-size", default="auto", help="weights that share a scale, or auto")
    arguments.add_argument("--sym", type=boolean, default=True)
    arguments.add_argument("--iters", type=int, default=200, help="steps of each block")
    options = arguments.parse_args()

    build(
        options,
        quantize,
        format="autoround-int4",
        engine="gptqmodel",
        tool="auto-round",
        tool_version=version("auto-round"),
        parameters={name: getattr(options, name) for name in ("layout", "bits", "group_size", "sym", "iters")},
        group_size="group_size",
    )
