"""Quantize a model's weights to int8 or float8 with torchao, a scale for each row.

    python scripts/quantmill build.torchao SRC DST --parameters '{"type": "int8"}'

SRC is the fp16 artifact. The same input gives the same bytes.
"""

from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

from quantmill.build.quantizer.program import BuildTask, Tool

TYPES = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}


def quantize(job: BuildTask) -> None:
    """Have transformers replace the linear layers' weights, and save."""
    config = TorchAoConfig(TYPES[job.parameters["type"]]())
    model = AutoModelForCausalLM.from_pretrained(
        job.src, quantization_config=config, device_map={"": job.device}, dtype="auto"
    )
    model.save_pretrained(job.saved)


TOOL = Tool(
    "torchao",
    quantize,
    parameters=("type",),
    calibrated=False,
    cast=lambda tensor, _: False,  # loaded as the fp16 artifact stores it; scales stay float32
)


def main() -> None:
    TOOL.build(__doc__)
