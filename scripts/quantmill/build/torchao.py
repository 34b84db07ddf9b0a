"""Quantize a model's weights to int8 or float8 with torchao, a scale for each row.

    python scripts/quantmill build.torchao SRC DST --parameters '{"type": "int8"}'

SRC is the fp16 artifact. The same input gives the same bytes.
"""

from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

from quantmill.build.quantizer.program import BuildTask, Tool, as_saved

TYPES = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}


def quantize(task: BuildTask) -> None:
    """Have transformers replace the linear layers' weights, and save."""
    config = TorchAoConfig(TYPES[task.parameters["type"]]())
    model = AutoModelForCausalLM.from_pretrained(
        task.src, quantization_config=config, device_map={"": task.device}, dtype="auto"
    )
    model.save_pretrained(task.saved)


main = Tool(
    "torchao",
    quantize,
    parameters=("type",),
    calibrated=False,
    cast=as_saved,  # loaded as the fp16 artifact stores it; scales stay float32
).build
