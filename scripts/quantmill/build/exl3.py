"""Quantize a model to EXL3 with ExLlamaV3's converter, on a GPU.

    python scripts/quantmill build.exl3 SRC DST --calibration calibration.json --evaluation evaluation.json
        --parameters '{"bits": 4.0, "head_bits": 6, "codebook": "mul1"}'

SRC is the fp16 artifact. Run it in envs/exllamav3; QUANTMILL_EXLLAMAV3 names a folder of exllamav3.compile. The tool
saves its progress every two minutes, and resumes there.
"""

import torch
from safetensors.torch import save_file

from quantmill.build.quantizer.program import BuildTask, Tool, keep_dtype
from quantmill.checkpoint import shards
from quantmill.exllamav3 import library
from quantmill.layouts.exl3 import BLOCK

PROGRESS = "ckpt/job.json"


def quantize(task: BuildTask) -> None:
    """Call the converter with the samples' ids."""
    library()
    from exllamav3.conversion import convert_model

    task.resume.mkdir(parents=True, exist_ok=True)
    samples = task.resume / "calibration.safetensors"
    save_file({"input_ids": torch.tensor(task.calibration.samples)}, samples)
    words = task.parameters | {
        "in_dir": task.src,
        "out_dir": task.saved,
        "work_dir": task.resume,
        "cal_data": samples,
        "cal_rows": len(task.calibration.samples),
        "cal_cols": task.calibration.sequence_length,
    }
    flags = ["--resume"] if (task.resume / PROGRESS).exists() else []
    options = convert_model.parser.parse_args([*(f"--{name}={value}" for name, value in words.items()), *flags])
    settings, state, good, reason = convert_model.prepare(options)
    if not good:
        raise ValueError(reason)
    try:
        convert_model.main(settings, state)
    except RuntimeError as error:
        width = shards.read_config(task.src / "config.json")["hidden_size"]
        if width % BLOCK == 0:
            raise
        why = f"the hidden size {width} is not a multiple of {BLOCK}, and this model's layers need one"
        raise ValueError(f"{why}: {error}") from error


main = Tool("exllamav3", quantize, parameters=("bits", "head_bits", "codebook"), cast=keep_dtype).build
