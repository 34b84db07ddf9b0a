"""Quantize a model with bitsandbytes: nf4 or fp4, or the weights of LLM.int8().

    python scripts/quantmill build.bitsandbytes SRC DST --parameters '{"type": "nf4", "double_quant": false}'

SRC is the fp16 artifact. The same input gives the same bytes. The model is saved before it runs: on a CPU a forward
pass repacks the weights, and saves another model afterwards.
"""

from transformers import BitsAndBytesConfig

from quantmill.build.quantizer.program import BuildTask, Tool, keep_dtype, quantize_by_transformers


def quantize(task: BuildTask) -> None:
    """Have transformers replace the linear layers, and save."""
    if task.parameters["type"] == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=task.parameters["type"],
            bnb_4bit_use_double_quant=task.parameters["double_quant"],
            bnb_4bit_compute_dtype="float16",
        )
    quantize_by_transformers(task, config)


main = Tool(
    "bitsandbytes",
    quantize,
    parameters=("type", "double_quant"),
    calibrated=False,
    cast=keep_dtype,  # loaded as the fp16 artifact stores it; scales stay float32
).build
