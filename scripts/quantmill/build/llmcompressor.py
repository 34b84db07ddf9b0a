"""Quantize a model to compressed-tensors with llm-compressor.

    python scripts/quantmill build.llmcompressor SRC DST --scheme W4A16 --calibration calibration.json
        --evaluation evaluation.json [--group-size auto]

SRC is the fp16 artifact. W4A16 and W8A8 are rounded by GPTQ; the others to the nearest. All but FP8_DYNAMIC, NVFP4A16
and MXFP4 calibrate. The same input gives the same bytes on the same kind of CPU with as many threads.
"""

from importlib.metadata import version

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, GenerationConfig

from quantmill.build.quantizer.program import BuildTask, build, parser

# scheme, by llm-compressor's name -> weights that share a scale: None for a row, "auto" where the scheme leaves it open
GROUPS = {"W4A16": "auto", "W8A8": None, "FP8_DYNAMIC": None, "NVFP4A16": "16", "NVFP4": "16", "MXFP4": "32"}
CALIBRATED = ("W4A16", "W8A8", "NVFP4")
ROUNDED = ("W4A16", "W8A8")  # by GPTQ
IGNORED = ["lm_head"]


def recipe(job: BuildTask) -> GPTQModifier | QuantizationModifier:
    """What llm-compressor is to do."""
    scheme, size = job.parameters["scheme"], job.parameters.get("group_size")
    if scheme not in ROUNDED:
        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=IGNORED)
    if scheme == "W8A8":
        return GPTQModifier(targets="Linear", scheme=scheme, ignore=IGNORED)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return GPTQModifier(config_groups=groups, ignore=IGNORED)


def quantize(job: BuildTask) -> None:
    """Call llm-compressor with the samples' ids, each by itself."""
    model = AutoModelForCausalLM.from_pretrained(job.src, dtype=job.dtype).to(job.device)
    more = {}
    if job.calibration:
        samples = job.calibration.samples
        rows = {"input_ids": samples, "attention_mask": [[1] * len(ids) for ids in samples]}
        more = {
            "dataset": Dataset.from_dict(rows),
            "num_calibration_samples": len(samples),
            "max_seq_length": job.calibration.sequence_length,
            "shuffle_calibration_samples": False,
        }
    oneshot(model=model, recipe=recipe(job), **more)
    model.generation_config = GenerationConfig()  # the source's own is carried over; some are refused here
    model.save_pretrained(job.saved, save_compressed=True)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--scheme", choices=[*GROUPS], required=True)
    arguments.add_argument("--group-size", default="auto", help="of W4A16: weights that share a scale, or auto")
    options = arguments.parse_args()

    size = options.group_size if GROUPS[options.scheme] == "auto" else GROUPS[options.scheme]
    build(
        options,
        quantize,
        format=f"ct-{options.scheme.lower()}",
        engine="compressed-tensors",
        tool="llm-compressor",
        tool_version=version("llmcompressor"),
        parameters={"scheme": options.scheme, **({"group_size": size} if size else {})},
        group_size="group_size" if size else None,
        calibrated=options.scheme in CALIBRATED,
        # scales of a row or a matrix may be smaller than float16's normal numbers
        cast=lambda tensor: tensor.dtype == "F32" and (options.scheme == "W4A16" or "_scale" not in tensor.name),
    )
