"""Quantize a model's weights to int8 or float8 with torchao, a scale for each row.

    python scripts/quantmill build.torchao SRC DST --type int8

SRC is the fp16 artifact. The same input gives the same bytes.
"""

from importlib.metadata import version

from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

from quantmill.build.quantizer.program import BuildTask, build, parser

TYPES = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}


def quantize(job: BuildTask) -> None:
    """Have transformers replace the linear layers' weights, and save."""
    config = TorchAoConfig(TYPES[job.parameters["type"]]())
    model = AutoModelForCausalLM.from_pretrained(
        job.src, quantization_config=config, device_map={"": job.device}, dtype="auto"
    )
    model.save_pretrained(job.saved)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--type", choices=[*TYPES], required=True)
    options = arguments.parse_args()

    build(
        options,
        quantize,
        format=f"torchao-{options.type}",
        engine="torchao",
        tool="torchao",
        tool_version=version("torchao"),
        parameters={"type": options.type},
        calibrated=False,
        cast=lambda tensor: False,  # loaded as the fp16 artifact stores it; scales stay float32
    )
