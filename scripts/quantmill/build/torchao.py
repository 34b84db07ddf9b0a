"""Quantize a model's weights to int8 or float8 with torchao, a scale for each row.

    python scripts/quantmill build.torchao SRC DST --parameters '{"type": "int8"}'

SRC is the fp16 artifact. The same input gives the same bytes.
"""

from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import TorchAoConfig

from quantmill.build.quantizer.program import BuildTask, Tool, keep_dtype, quantize_by_transformers

TYPES = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}


def quantize(task: BuildTask) -> None:
    """Have transformers replace the linear layers' weights, and save."""
    quantize_by_transformers(task, TorchAoConfig(TYPES[task.parameters["type"]]()))


main = Tool(
    "torchao",
    quantize,
    parameters=("type",),
    calibrated=False,
    cast=keep_dtype,  # loaded as the fp16 artifact stores it; scales stay float32
).build
